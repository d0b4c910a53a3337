// What is said of one event: beside the pointer, and below the charts once it is chosen.

function detailRows(hit) {
  if (hit.stretch) {
    const { stretch } = hit;
    const what = stretch.kind === "copy" ? "Copy or cast for a collective" : "Compute";
    return {
      title: `${what}: ${stretch.label || "model"}`,
      rows: [["takes", timeText(stretch.end - stretch.start)], ["from", timeText(stretch.start, 4)], ["nodes", String(stretch.nodes)], ["half", stretch.half]],
    };
  }
  const { flight } = hit;
  const { one } = flight;
  const rows = [
    ["group", `${one.group}, ${flight.ranks} ranks`],
    ["bytes", sizeText(one.num_bytes)],
    ["takes", `${timeText(flight.seconds)} (${flight.seconds ? rateText(one.num_bytes / flight.seconds) : "no links"})`],
    ["starts", `${timeText(flight.start, 4)}${flight.start > flight.issued ? `, after ${timeText(flight.start - flight.issued)} in the queue` : ""}`],
    ["ends", timeText(flight.end, 4)],
    ["needed", timeText(flight.needed, 4)],
    ["exposed", flight.exposed > 0 ? timeText(flight.exposed) : "no"],
  ];
  const found = { title: `${kindText(one.kind)} ${one.unit || (one.reshard && `${one.reshard} ${one.module}`) || one.name}`, rows, exposed: flight.exposed > 0 };
  if (found.exposed && one.reason) Object.assign(found, { reason: one.reason, remedy: one.remedy, isMoved: Math.abs(flight.exposed - flight.was) > 1e-9 });
  return found;
}

function detailElement(found) {
  const list = element("dl", {});
  for (const [name, value] of found.rows) list.append(element("dt", {}, name), element("dd", {}, value));
  const made = element("div", { class: found.exposed ? "detail is-exposed" : "detail" }, element("h3", {}, found.title), list);
  if (found.reason) {
    made.append(element("p", {}, element("b", {}, "Why: "), found.reason), element("p", {}, element("b", {}, "What would help: "), found.remedy));
    if (found.isMoved) made.append(element("p", { class: "muted" }, "Reason and remedy are those of the step as inspected."));
  }
  return made;
}

function memoryDetail(point, categories) {
  const rows = STACK.map((name) => [name, point.bytes[categories.indexOf(name)]]).filter(([, bytes]) => bytes).reverse();
  return {
    title: `${sizeText(point.total)} live at ${timeText(point.time, 4)} (${point.half})`,
    rows: rows.map(([name, bytes]) => [name, sizeText(bytes)]),
  };
}

// The plate beside the pointer.
class Tooltip {
  constructor(plate) {
    this.plate = plate;
  }

  show(content, event) {
    this.plate.replaceChildren(content);
    this.plate.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = this.plate;
    const right = document.documentElement.clientWidth - width - 8;
    const below = event.clientY + 18 + height < window.innerHeight;
    this.plate.style.left = `${Math.max(8, Math.min(event.clientX + 14, right))}px`;
    this.plate.style.top = `${below ? event.clientY + 18 : Math.max(8, event.clientY - height - 14)}px`;
  }

  hide() {
    this.plate.hidden = true;
  }
}
