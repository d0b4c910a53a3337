// The step once more with other prices. The order of starts and waits stays as it is.

// Seconds of a collective on links so many times as quick (bandwidth) and as late (latency).
function priceSeconds(price, links) {
  let quickest = Infinity;
  for (const way of price.ways) {
    let slowest = 0;
    for (const [latency, transfer] of way) {
      slowest = Math.max(slowest, latency * links.latency + transfer / links.bandwidth);
    }
    quickest = Math.min(quickest, slowest);
  }
  return price.fixed_seconds + quickest;
}

// Of which so many pass while the collective in front of it in its group still moves.
function overlappedSeconds(price, links) {
  const latency = price.overlapped_latency_seconds;
  return latency * links.latency + (price.overlapped_seconds - latency) / links.bandwidth;
}

// When compute is expected to go on that arrives at a wait; graphshard.prices.behind_wait says why.
function behindWait(clock, finish, spread) {
  if (clock >= finish + spread) return clock;
  if (clock <= finish - spread) return finish;
  return clock + (finish + spread - clock) ** 2 / (4 * spread);
}

function priceKey(one) {
  return [one.kind, one.group, one.num_bytes].join("|");
}

// One stream of compute, one queue for each group; see "schedule" in the report's schema.
function runHalf(half, prices, links) {
  const free = new Map();
  const flights = half.collectives.map(() => ({}));
  const waits = [];
  const marks = [];
  let waited = 0;
  for (const step of half.schedule) {
    const clock = step.busy_seconds + waited;
    const one = half.collectives[step.collective];
    const flight = flights[step.collective];
    if (step.is_start) {
      const price = prices.get(priceKey(one));
      const seconds = priceSeconds(price, links);
      const overlapped = Math.min(overlappedSeconds(price, links), seconds);
      const front = free.get(one.group) || { finished: 0, overlapped: 0 };
      const began = Math.max(clock, front.finished - Math.min(overlapped, front.overlapped));
      Object.assign(flight, { issued: clock, began, finished: began + seconds, seconds, spread: price.spread_seconds });
      free.set(one.group, { finished: flight.finished, overlapped });
    } else {
      flight.needed = clock;
      flight.exposed = behindWait(clock, flight.finished, flight.spread) - clock;
      if (flight.exposed > 0) {
        waits.push({ busy: step.busy_seconds, start: clock, seconds: flight.exposed, collective: step.collective });
        waited += flight.exposed;
      }
      marks.push([clock, clock + flight.exposed]);
    }
  }
  return { seconds: half.compute_seconds + waited, exposed: waited, waits, marks, flights };
}

// All halves. The optimizer works on shards alone: its time goes with their size.
function runStep(report, choice) {
  const prices = new Map(choice.world.prices.map((price) => [priceKey(price), price]));
  const factor = shardFactor(report, choice.world);
  const halves = report.halves.map((half) => {
    const run = runHalf(half, prices, choice.links);
    return half.name === "optimizer" ? { ...run, seconds: run.seconds * factor, stretched: factor } : run;
  });
  const sum = (name) => halves.reduce((total, run, index) => total + report.halves[index].repeats * run[name], 0);
  return { halves, factor, seconds: sum("seconds"), exposed: sum("exposed") };
}

function neutralWorld(report) {
  const wanted = JSON.stringify(report.mesh);
  return report.worlds.findIndex((world) => JSON.stringify(world.mesh) === wanted);
}

// The axes of a sharded model have names of their own; there the shards are on the innermost.
function numShards(mesh) {
  return mesh.shard || Object.values(mesh).at(-1) || 1;
}

function shardFactor(report, world) {
  return numShards(report.mesh) / numShards(world.mesh);
}

// Bytes by category, shards so many times as large.
const SHARD_CATEGORIES = ["parameters", "optimizer", "gradients"];

function scaledBytes(categories, numBytes, factor) {
  return numBytes.map((size, index) => (SHARD_CATEGORIES.includes(categories[index]) ? size * factor : size));
}

// A moment of one run in another run of the same schedule: as far into the same wait, or behind it.
function movedClock(seconds, was, now) {
  let shift = 0;
  for (let index = 0; index < was.marks.length; index += 1) {
    const [start, end] = was.marks[index];
    if (seconds < start) break;
    const [newStart, newEnd] = now.marks[index];
    if (seconds < end) return newStart + ((seconds - start) / (end - start)) * (newEnd - newStart);
    shift = newEnd - end;
  }
  return seconds + shift;
}

// The clock with waits; what begins at a wait begins behind it, what ends there ends in front of it.
function clockAt(busy, waits, isEnd, epsilon) {
  let clock = busy;
  for (const wait of waits) {
    if (isEnd ? wait.busy < busy - epsilon : wait.busy <= busy + epsilon) clock += wait.seconds;
    else break;
  }
  return clock;
}

// Everything that is drawn, on the clock of one run of each half after the other.
function layOut(report, neutral, run) {
  const found = { halves: [], stretches: [], waits: [], flights: [], memory: [], seconds: 0, peak: 0 };
  report.halves.forEach((half, number) => {
    const was = neutral.halves[number];
    const now = run.halves[number];
    const begin = found.seconds;
    const stretched = now.stretched || 1;
    const epsilon = 1e-9 * (half.seconds || 1);
    found.halves.push({ name: half.name, repeats: half.repeats, start: begin, end: begin + now.seconds });
    let busy = 0;
    for (const event of half.compute) {
      if (event.kind === "wait") continue;
      const cuts = [busy, ...now.waits.map((wait) => wait.busy), busy + event.seconds].filter(
        (cut, index, all) => index === 0 || index === all.length - 1 || (cut > busy + epsilon && cut < busy + event.seconds - epsilon),
      );
      for (let index = 1; index < cuts.length; index += 1) {
        found.stretches.push({
          half: half.name, label: event.label, kind: event.kind, nodes: event.num_nodes,
          start: begin + stretched * clockAt(cuts[index - 1], now.waits, false, epsilon),
          end: begin + stretched * clockAt(cuts[index], now.waits, true, epsilon),
        });
      }
      busy += event.seconds;
    }
    half.collectives.forEach((one, index) => {
      const flight = now.flights[index];
      found.flights.push({
        half: half.name, one, seconds: flight.seconds, exposed: flight.exposed, was: was.flights[index].exposed,
        issued: begin + flight.issued, start: begin + flight.began, end: begin + flight.finished, needed: begin + flight.needed,
      });
    });
    const first = found.flights.length - half.collectives.length;
    for (const wait of now.waits) {
      found.waits.push({ start: begin + wait.start, end: begin + wait.start + wait.seconds, flight: found.flights[first + wait.collective] });
    }
    for (const point of half.memory) {
      const at = movedClock(point.seconds, was, now);
      const bytes = scaledBytes(report.categories, point.num_bytes, run.factor);
      const total = bytes.reduce((sum, size) => sum + size, 0);
      found.memory.push({ at: begin + stretched * at, bytes, total, half: half.name });
      found.peak = Math.max(found.peak, total);
    }
    found.seconds += now.seconds;
  });
  return found;
}
