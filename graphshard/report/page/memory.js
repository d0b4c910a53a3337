// Memory over the step: live bytes by category, one on the other.

// From the bottom: what lives longest comes first.
const STACK = ["parameters", "optimizer", "gradients", "inputs", "activations", "gathered", "unreduced", "buckets", "temporaries"];

class MemoryChart {
  constructor(canvas, view, categories) {
    Object.assign(this, { canvas, view });
    this.order = STACK.map((name) => categories.indexOf(name));
    this.height = 260;
  }

  show(layout, limits) {
    Object.assign(this, { layout, limits });
    this.draw();
  }

  draw() {
    const { context, width } = prepareCanvas(this.canvas, this.height);
    const { view, layout } = this;
    const bottom = this.height - 2;
    const highest = Math.max(...this.limits.map((limit) => limit.bytes));
    const most = highest <= 3 * layout.peak ? Math.max(highest, layout.peak) : layout.peak;
    const top = most * 1.12 || 1;
    const x = (time) => ((time - view.start) / (view.end - view.start)) * width;
    const y = (bytes) => bottom - (bytes / top) * (bottom - 8);
    this.pixel = (view.end - view.start) / width;
    this.drawGrid(context, width, y, top);
    this.drawStack(context, width, x, y);
    for (const bytes of this.gridLines) this.label(context, sizeText(bytes, 2), 4, y(bytes) + 12, "left", colour("muted"));
    this.drawPeak(context, width, x, y);
    for (const limit of this.limits) this.drawLimit(context, width, y, limit, top);
  }

  drawGrid(context, width, y, top) {
    const unit = [2 ** 40, 2 ** 30, 2 ** 20, 2 ** 10].find((size) => top >= 2 * size) || 1;
    const lines = ticks(0, top / unit, 4).found.map((tick) => tick * unit);
    this.gridLines = lines.filter((bytes) => bytes > 0 && y(bytes) > 30 && Math.abs(y(bytes) - y(this.layout.peak)) > 20);
    context.fillStyle = colour("grid");
    for (const bytes of this.gridLines) context.fillRect(0, Math.round(y(bytes)), width, 1);
  }

  drawStack(context, width, x, y) {
    const points = this.visible();
    const base = points.map(() => 0);
    for (const index of this.order) {
      if (!points.some((point) => point.bytes[index])) continue;
      context.beginPath();
      const above = points.map((point, number) => base[number] + point.bytes[index]);
      points.forEach((point, number) => {
        const right = number + 1 < points.length ? x(points[number + 1].at) : width;
        context.lineTo(x(point.at), y(above[number]));
        context.lineTo(right, y(above[number]));
      });
      for (let number = points.length - 1; number >= 0; number -= 1) {
        const right = number + 1 < points.length ? x(points[number + 1].at) : width;
        context.lineTo(right, y(base[number]));
        context.lineTo(x(points[number].at), y(base[number]));
      }
      context.closePath();
      context.fillStyle = colour(`memory-${STACK[this.order.indexOf(index)]}`);
      context.fill();
      above.forEach((value, number) => { base[number] = value; });
    }
  }

  // The points in the window, one on either side, so that the curve reaches the edges.
  visible() {
    const all = this.layout.memory;
    let first = 0;
    while (first + 1 < all.length && all[first + 1].at <= this.view.start) first += 1;
    let last = first;
    while (last + 1 < all.length && all[last].at < this.view.end) last += 1;
    return all.slice(first, last + 1);
  }

  drawPeak(context, width, x, y) {
    const peak = this.layout.memory.find((point) => point.total === this.layout.peak);
    const at = x(peak.at);
    const height = y(peak.total);
    if (at >= -1 && at <= width + 1) {
      context.fillStyle = colour("ink");
      context.beginPath();
      context.arc(Math.min(Math.max(at, 4), width - 4), height, 4, 0, 2 * Math.PI);
      context.fill();
    }
    context.save();
    context.setLineDash([2, 3]);
    context.strokeStyle = colour("ink");
    context.beginPath();
    context.moveTo(0, Math.round(height) + 0.5);
    context.lineTo(width, Math.round(height) + 0.5);
    context.stroke();
    context.restore();
    this.label(context, `peak ${sizeText(peak.total)}`, width - 4, height, "right", colour("ink"));
  }

  drawLimit(context, width, y, limit, top) {
    const off = limit.bytes > top;
    const height = off ? 8 : y(limit.bytes);
    const ink = colour(limit.bytes < this.layout.peak ? "bad" : "ok");
    if (!off) {
      context.save();
      context.setLineDash([8, 5]);
      context.lineWidth = 2;
      context.strokeStyle = ink;
      context.beginPath();
      context.moveTo(0, height);
      context.lineTo(width, height);
      context.stroke();
      context.restore();
    }
    this.label(context, `${limit.name} ${sizeText(limit.bytes)}${off ? ", above this chart" : ""}`, 4, height, "left", ink);
  }

  // Text on a plate, so that it can be read on any colour.
  label(context, text, x, y, align, ink) {
    const size = context.measureText(text).width;
    const left = align === "right" ? x - size - 8 : x;
    const above = y > 24 ? y - 12 : y + 13;
    context.fillStyle = colour("plate");
    context.fillRect(left, above - 9, size + 8, 18);
    context.fillStyle = ink;
    context.fillText(text, left + 4, above);
  }

  at(point) {
    const time = this.view.start + point.x * this.pixel;
    let found = this.layout.memory[0];
    for (const one of this.layout.memory) {
      if (one.at > time) break;
      found = one;
    }
    return { ...found, time };
  }
}
