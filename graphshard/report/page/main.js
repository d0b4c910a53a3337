// Puts the page together once everything above is defined.

function start(report) {
  const byId = (id) => document.getElementById(id);
  document.querySelectorAll("table.sortable").forEach(makeSortable);
  const groups = [...new Set(report.halves.flatMap((half) => half.collectives.map((one) => one.group)))];
  const ranks = (choice, group) => choice.world.mesh[group] || report.halves.flatMap((half) => half.collectives).find((one) => one.group === group).num_ranks;
  const view = new View(1);
  const timeline = new Timeline(byId("timeline"), view, groups);
  const memory = new MemoryChart(byId("memory"), view, report.categories);
  const tooltip = new Tooltip(byId("tooltip"));
  const detail = byId("detail");
  const hint = [...detail.childNodes];
  let shown = null;

  const describe = (hit) => {
    if (hit.flight) hit.flight.ranks = ranks(shown.choice, hit.flight.one.group);
    return detailElement(detailRows(hit));
  };
  const select = (hit) => {
    timeline.selected = hit;
    detail.replaceChildren(...(hit ? [describe(hit)] : hint));
    tooltip.hide();
    timeline.draw();
  };
  const next = (step) => {
    const waits = shown.layout.waits;
    if (!waits.length) return;
    const at = waits.findIndex((wait) => timeline.selected && timeline.selected.flight === wait.flight);
    const wait = waits[at < 0 ? (step > 0 ? 0 : waits.length - 1) : (at + step + waits.length) % waits.length];
    const around = Math.max(3 * (wait.end - wait.start), wait.end - wait.flight.start, view.total / 60);
    if (wait.end - wait.start < (view.end - view.start) / 40) view.set(wait.start - around, wait.end + around);
    else if (wait.start < view.start || wait.end > view.end) view.pan((wait.start - view.start) / (view.end - view.start) - 0.4);
    select({ lane: "compute", start: wait.start, end: wait.end, flight: wait.flight });
  };
  const common = { next, leave: () => tooltip.hide() };
  attachGestures(timeline.canvas, view, {
    ...common,
    hover: (point, event) => {
      const hit = timeline.hit(point);
      timeline.canvas.style.cursor = hit ? "pointer" : "grab";
      if (hit) tooltip.show(describe(hit), event);
      else tooltip.hide();
    },
    tap: (point) => select(point && timeline.hit(point)),
  });
  attachGestures(memory.canvas, view, {
    ...common,
    hover: (point, event) => tooltip.show(detailElement(memoryDetail(memory.at(point), report.categories)), event),
    tap: (point) => point && detail.replaceChildren(detailElement(memoryDetail(memory.at(point), report.categories))),
  });
  const redraw = () => {
    if (!shown) return;
    timeline.draw();
    memory.draw();
    const isWhole = view.start === 0 && view.end === view.total;
    byId("window").textContent = isWhole ? "the whole step" : `${timeText(view.start, 4)} to ${timeText(view.end, 4)}`;
  };
  view.listen(redraw);
  const buttons = {
    "zoom-in": () => view.zoom(2), "zoom-out": () => view.zoom(0.5), "pan-left": () => view.pan(-0.3), "pan-right": () => view.pan(0.3),
    "whole": () => view.reset(), "exposed-before": () => next(-1), "exposed-next": () => next(1),
  };
  for (const [id, action] of Object.entries(buttons)) byId(id).addEventListener("click", action);

  const whatIf = new WhatIf(report, byId("what-if"), (now) => {
    shown = now;
    const { budget_bytes: budget, capacity_bytes: capacity } = report.memory;
    const limits = [{ name: budget === null && now.choice.budget === capacity ? "capacity" : "budget", bytes: now.choice.budget }];
    if (now.choice.budget !== capacity) limits.push({ name: "capacity", bytes: capacity });
    byId("moved").hidden = now.isNeutral;
    if (timeline.selected) select(null);
    timeline.show(now.layout);
    memory.show(now.layout, limits);
    byId("exposed-next").disabled = byId("exposed-before").disabled = !now.layout.waits.length;
    view.resize(now.layout.seconds);
    document.documentElement.dataset.stepSeconds = String(now.run.seconds);
    document.documentElement.dataset.exposedSeconds = String(now.run.exposed);
    document.documentElement.dataset.peakBytes = String(now.layout.peak);
  });
  byId("moved-reset").addEventListener("click", () => byId("what-if").reset());
  whatIf.read(location.hash.slice(1));
  whatIf.update();
  view.reset();
  document.documentElement.dataset.neutralSeconds = String(whatIf.neutral.seconds);
  const measure = () => {
    redraw();
    document.documentElement.dataset.overflow = String(document.documentElement.scrollWidth - document.documentElement.clientWidth);
    document.documentElement.dataset.width = String(window.innerWidth);
  };
  new ResizeObserver(measure).observe(document.body);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  measure();
  window.page = { report, view, timeline, memory, whatIf, next, select, shown: () => shown };
  document.documentElement.dataset.state = "ready";
}

start(JSON.parse(document.getElementById("report").textContent));
