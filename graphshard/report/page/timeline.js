// The timeline: halves, the compute stream, and a lane for each process group.

const LANE = { axis: 24, band: 22, title: 18, compute: 34, group: 24, gap: 6 };

const COLLECTIVE_COLOURS = { all_gather: "gather", reduce_scatter: "reduce", all_reduce: "allreduce" };

class Timeline {
  constructor(canvas, view, groups) {
    Object.assign(this, { canvas, view, groups });
    this.selected = null;
    let y = LANE.axis + LANE.band + LANE.gap;
    this.lanes = [["compute", LANE.compute], ...groups.map((group) => [group, LANE.group])].map(([name, height]) => {
      const lane = { name, title: y, top: y + LANE.title, bottom: y + LANE.title + height };
      y = lane.bottom + LANE.gap;
      return lane;
    });
    this.height = y;
  }

  show(layout) {
    this.layout = layout;
    this.draw();
  }

  draw() {
    const { context, width } = prepareCanvas(this.canvas, this.height);
    const { view, layout } = this;
    const x = (time) => ((time - view.start) / (view.end - view.start)) * width;
    const seen = (one) => one.end >= view.start && one.start <= view.end;
    this.pixel = (view.end - view.start) / width;
    this.drawAxis(context, width, x);
    for (const half of layout.halves.filter(seen)) this.drawHalf(context, width, x, half);
    for (const lane of this.lanes) this.drawTitle(context, width, lane);
    this.drawCompute(context, x, seen);
    for (const flight of layout.flights.filter(seen)) this.drawFlight(context, x, flight);
    if (this.selected) this.drawSelection(context, x);
  }

  drawAxis(context, width, x) {
    const { found, step } = ticks(this.view.start, this.view.end, Math.max(3, width / 90));
    const unit = step >= 0.5 ? ["s", 1] : step >= 2e-4 ? ["ms", 1e3] : ["µs", 1e6];
    const places = Math.max(0, -Math.floor(Math.log10(step * unit[1]) + 1e-9));
    for (const tick of found) {
      context.fillStyle = colour("grid");
      context.fillRect(Math.round(x(tick)), LANE.axis - 4, 1, this.height);
      context.fillStyle = colour("muted");
      const text = `${(tick * unit[1]).toFixed(places)} ${unit[0]}`;
      const size = context.measureText(text).width;
      context.fillText(text, Math.min(Math.max(x(tick) - size / 2, 0), width - size), 10);
    }
  }

  drawHalf(context, width, x, half) {
    const [left, right] = [Math.max(0, x(half.start)), Math.min(width, x(half.end))];
    context.fillStyle = colour("band");
    context.fillRect(left + 0.5, LANE.axis, right - left - 1, LANE.band);
    const text = half.repeats > 1 ? `${half.name} × ${half.repeats}` : half.name;
    this.clippedText(context, text, left + 6, right - 4, LANE.axis + LANE.band / 2, colour("ink"));
  }

  drawTitle(context, width, lane) {
    context.fillStyle = colour("lane");
    context.fillRect(0, lane.top, width, lane.bottom - lane.top);
    context.fillStyle = colour("muted");
    context.fillText(lane.name === "compute" ? "compute stream" : `collectives over ${lane.name}`, 2, lane.title + LANE.title / 2 - 1);
  }

  drawCompute(context, x, seen) {
    const { top, bottom } = this.lanes[0];
    const tones = [colour("compute"), colour("compute-other")];
    let tone = 0;
    let unit = null;
    for (const one of this.layout.stretches) {
      const name = one.label.split(".").slice(0, 2).join(".");
      if (one.kind === "compute" && name !== unit) {
        unit = name;
        tone = 1 - tone;
      }
      if (!seen(one)) continue;
      const [left, right] = [x(one.start), x(one.end)];
      context.fillStyle = one.kind === "copy" ? colour("copy") : tones[tone];
      context.fillRect(left, top, Math.max(right - left - (right - left > 3 ? 0.6 : 0), 0.3), bottom - top);
      if (right - left > 44) this.clippedText(context, one.label || "model", Math.max(left, 0) + 5, right - 4, (top + bottom) / 2, colour("on-compute"));
    }
    for (const wait of this.layout.waits.filter(seen)) {
      const left = x(wait.start);
      const size = Math.max(x(wait.end) - left, 2);
      this.hatched(context, left, top - 2, size, bottom - top + 4);
      if (size > 70) this.clippedText(context, `waits ${timeText(wait.end - wait.start)}`, Math.max(left, 0) + 6, left + size - 4, (top + bottom) / 2, colour("on-exposed"));
    }
  }

  drawFlight(context, x, flight) {
    const lane = this.lanes.find((one) => one.name === flight.one.group);
    const left = x(flight.start);
    const size = Math.max(x(flight.end) - left - 0.6, 1);
    context.fillStyle = colour(COLLECTIVE_COLOURS[flight.one.kind] || "collective");
    context.fillRect(left, lane.top, size, lane.bottom - lane.top);
    if (flight.exposed > 0) {
      const from = x(Math.min(Math.max(flight.start, flight.needed), flight.end));
      context.fillStyle = colour("exposed");
      context.fillRect(from, lane.bottom - 5, Math.max(x(flight.end) - from, 2), 5);
    }
    if (size > 52) {
      const text = `${kindText(flight.one.kind)} ${flight.one.unit || flight.one.module}`;
      this.clippedText(context, text, Math.max(left, 0) + 5, left + size - 4, (lane.top + lane.bottom) / 2, colour("on-compute"));
    }
  }

  hatched(context, left, top, width, height) {
    context.fillStyle = colour("exposed");
    context.fillRect(left, top, width, height);
    if (width < 8) return;
    context.save();
    context.beginPath();
    context.rect(left, top, width, height);
    context.clip();
    context.strokeStyle = colour("hatch");
    context.lineWidth = 2;
    const from = Math.max(left, -height);
    const until = Math.min(left + width, this.canvas.clientWidth + height);
    for (let at = from - height; at < until; at += 9) {
      context.beginPath();
      context.moveTo(at, top + height);
      context.lineTo(at + height, top);
      context.stroke();
    }
    context.restore();
  }

  clippedText(context, text, left, right, y, fill) {
    if (right - left < 14) return;
    let shown = text;
    while (shown && context.measureText(shown === text ? shown : `${shown}…`).width > right - left) shown = shown.slice(0, -1);
    if (shown.length < Math.min(3, text.length)) return;
    context.fillStyle = fill;
    context.fillText(shown === text ? shown : `${shown}…`, left, y);
  }

  drawSelection(context, x) {
    const { start, end } = this.selected;
    const lane = this.lanes.find((one) => one.name === this.selected.lane);
    context.strokeStyle = colour("ink");
    context.lineWidth = 2;
    context.strokeRect(x(start) - 1, lane.top - 2, Math.max(x(end) - x(start), 2) + 2, lane.bottom - lane.top + 4);
  }

  // What lies at a point: {lane, start, end, flight or stretch}; waits count a few pixels more.
  hit(point) {
    const lane = this.lanes.find((one) => point.y >= one.top - 5 && point.y <= one.bottom + 5);
    if (!lane) return null;
    const time = this.view.start + point.x * this.pixel;
    const near = 3 * this.pixel;
    const inside = (margin) => (one) => one.start - margin <= time && time <= one.end + margin;
    if (lane.name !== "compute") {
      const flights = this.layout.flights.filter((one) => one.one.group === lane.name);
      const flight = flights.find(inside(0)) || flights.find(inside(near));
      return flight ? { lane: lane.name, start: flight.start, end: flight.end, flight } : null;
    }
    const wait = this.layout.waits.find(inside(0)) || this.layout.waits.find(inside(near));
    if (wait) return { lane: "compute", start: wait.start, end: wait.end, flight: wait.flight };
    const stretch = this.layout.stretches.find(inside(0));
    return stretch ? { lane: "compute", start: stretch.start, end: stretch.end, stretch } : null;
  }
}
