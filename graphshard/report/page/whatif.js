// The sliders. Nothing is planned here: see simulate.js, and what the page says beside the sliders.

const GIB = 2 ** 30;

class WhatIf {
  constructor(report, form, apply) {
    Object.assign(this, { report, form, apply });
    this.neutralWorld = neutralWorld(report);
    this.neutral = runStep(report, { world: report.worlds[this.neutralWorld], links: { bandwidth: 1, latency: 1 } });
    this.limit = report.memory.budget_bytes ?? report.memory.capacity_bytes;
    this.inputs = Object.fromEntries(["bandwidth", "latency", "devices", "budget"].map((name) => [name, form.elements[name]]));
    const { devices, budget } = this.inputs;
    devices.max = String(report.worlds.length - 1);
    devices.disabled = report.worlds.length < 2;
    this.budgets = [report.memory.peak_bytes / 4, 2 * Math.max(this.limit, report.memory.peak_bytes)];
    this.reset();
    form.addEventListener("input", () => this.update());
    form.addEventListener("reset", (event) => {
      event.preventDefault();
      this.reset();
      this.update();
    });
  }

  reset() {
    this.inputs.bandwidth.value = "0";
    this.inputs.latency.value = "0";
    this.inputs.devices.value = String(this.neutralWorld);
    this.inputs.budget.value = String(this.budgetPlace(this.limit));
    this.atBudget = this.inputs.budget.value;
  }

  // The budget's slider is logarithmic, from 0 to 1000.
  budgetAt(place) {
    const [least, most] = this.budgets;
    return least * (most / least) ** (place / 1000);
  }

  budgetPlace(bytes) {
    const [least, most] = this.budgets;
    return (1000 * Math.log(bytes / least)) / Math.log(most / least);
  }

  // Of a text such as "bandwidth=0.5&devices=16"; what is not in it stays neutral.
  read(text) {
    const wanted = new URLSearchParams(text);
    for (const name of ["bandwidth", "latency"]) {
      if (Number(wanted.get(name)) > 0) this.inputs[name].value = String(20 * Math.log2(Number(wanted.get(name))));
    }
    const world = this.report.worlds.findIndex((one) => String(one.num_ranks) === wanted.get("devices"));
    if (world >= 0) this.inputs.devices.value = String(world);
    if (Number(wanted.get("budget")) > 0) this.inputs.budget.value = String(this.budgetPlace(Number(wanted.get("budget")) * GIB));
  }

  choice() {
    const factor = (name) => 2 ** (Number(this.inputs[name].value) / 20);
    const budget = this.inputs.budget.value === this.atBudget ? this.limit : this.budgetAt(Number(this.inputs.budget.value));
    return {
      links: { bandwidth: factor("bandwidth"), latency: factor("latency") },
      world: this.report.worlds[Number(this.inputs.devices.value)],
      budget,
    };
  }

  isNeutral() {
    const { bandwidth, latency, devices } = this.inputs;
    return bandwidth.value === "0" && latency.value === "0" && devices.value === String(this.neutralWorld);
  }

  update() {
    const choice = this.choice();
    const run = this.isNeutral() ? this.neutral : runStep(this.report, choice);
    const layout = layOut(this.report, this.neutral, run);
    this.label(choice, layout);
    this.compare(choice, run, layout);
    this.apply({ choice, run, layout, isNeutral: this.isNeutral() });
  }

  label(choice, layout) {
    const { card } = this.report;
    const [near, far] = [card.intra_node, card.inter_node];
    const { bandwidth, latency } = choice.links;
    this.say("bandwidth", `${factorText(bandwidth)}: ${rateText(near.bandwidth * bandwidth)} in a node, ${rateText(far.bandwidth * bandwidth)} between`);
    this.say("latency", `${factorText(latency)}: ${timeText(near.latency_seconds * latency)} a hop in a node, ${timeText(far.latency_seconds * latency)} between`);
    const mesh = Object.entries(choice.world.mesh).map(([name, size]) => `${name}=${size}`).join(", ");
    this.say("devices", `${choice.world.num_ranks} ranks${mesh ? ` (${mesh})` : ""}`);
    const spare = choice.budget - layout.peak;
    this.say("budget", `${sizeText(choice.budget)} a rank: ${spare >= 0 ? `fits, ${sizeText(spare)} to spare` : `does not fit, ${sizeText(-spare)} too much`}`);
    this.form.elements["budget-out"].className = spare >= 0 ? "good" : "bad";
  }

  say(name, text) {
    this.form.elements[`${name}-out`].value = text;
    this.inputs[name].setAttribute("aria-valuetext", text);
  }

  compare(choice, run, layout) {
    const { report } = this;
    const base = { run: this.neutral, ranks: report.num_ranks, peak: report.memory.peak_bytes };
    const other = { run, ranks: choice.world.num_ranks, peak: layout.peak };
    const through = report.throughput;
    const lines = [
      ["Step", (one) => one.run.seconds, timeText, -1],
      ["Exposed", (one) => one.run.exposed, timeText, -1],
      ["Exposed share", (one) => (one.run.seconds ? one.run.exposed / one.run.seconds : 0), percent, 0],
    ];
    if (through) {
      lines.push(["MFU", (one) => through.model_flops / (through.peak_flops * one.run.seconds), percent, 0]);
      if (through.tokens !== null) {
        const tokens = through.tokens_per_second_per_rank * report.step_seconds; // less than its batch, if ranks share one
        const whole = (value) => Math.round(value).toLocaleString("en-US");
        lines.push(["Tokens/s a rank", (one) => tokens / one.run.seconds, whole, 1]);
        lines.push(["Tokens/s in all", (one) => (tokens * one.ranks) / one.run.seconds, whole, 1]);
      }
    }
    lines.push(["Memory a rank", (one) => one.peak, sizeText, -1]);
    const body = document.querySelector("#compare tbody");
    body.replaceChildren(...lines.map(([name, value, text, better]) => {
      const [was, is] = [value(base), value(other)];
      const change = was ? is / was - 1 : 0;
      const isSame = Math.abs(change) < 5e-4 || better === 0;
      const sign = change > 0 ? "+" : "−";
      return element("tr", {},
        element("th", { scope: "row" }, name), element("td", {}, text(was)), element("td", {}, text(is)),
        element("td", { class: isSame ? "muted" : change * better > 0 ? "good" : "bad" }, isSame ? "" : change > 3 ? factorText(1 + change) : `${sign}${(100 * Math.abs(change)).toFixed(1)} %`));
    }));
  }
}
