// The stretch of time that the charts show, and how people move it.

class View {
  constructor(total) {
    this.listeners = [];
    this.total = total;
    this.start = 0;
    this.end = total;
  }

  listen(listener) {
    this.listeners.push(listener);
  }

  set(start, end) {
    const width = Math.min(this.total, Math.max(end - start, this.total * 1e-5));
    this.start = Math.min(Math.max(0, start), this.total - width);
    this.end = this.start + width;
    this.listeners.forEach((listener) => listener());
  }

  // Another length of the whole; what was seen whole stays seen whole.
  resize(total) {
    const factor = this.total ? total / this.total : 1;
    this.total = total;
    this.set(this.start * factor, this.end * factor);
  }

  zoom(factor, at = (this.start + this.end) / 2) {
    this.set(at - (at - this.start) / factor, at + (this.end - at) / factor);
  }

  pan(share) {
    const width = this.end - this.start;
    this.set(this.start + share * width, this.end + share * width);
  }

  reset() {
    this.set(0, this.total);
  }
}

// Pointer, wheel and keys of one canvas. The wheel zooms where the chart has the focus, or with Ctrl,
// so that it does not catch those who scroll the page.
function attachGestures(canvas, view, actions) {
  const pointers = new Map();
  let moved = 0;
  const timeAt = (x) => view.start + (x / canvas.clientWidth) * (view.end - view.start);
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };
  canvas.addEventListener("wheel", (event) => {
    const sideways = event.shiftKey ? event.deltaY : event.deltaX;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      view.pan(sideways / canvas.clientWidth);
    } else if (event.ctrlKey || event.metaKey || document.activeElement === canvas) {
      view.zoom(Math.exp(-event.deltaY / 400), timeAt(place(event).x));
    } else return;
    event.preventDefault();
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, place(event));
    if (canvas.setPointerCapture && event.isTrusted) canvas.setPointerCapture(event.pointerId);
    moved = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    const now = place(event);
    const before = pointers.get(event.pointerId);
    if (!before) {
      if (event.pointerType !== "touch") actions.hover(now, event);
      return;
    }
    if (pointers.size === 1) {
      moved += Math.abs(now.x - before.x) + Math.abs(now.y - before.y);
      if (moved > 4) view.pan((before.x - now.x) / canvas.clientWidth);
    } else {
      moved = 100;
      const other = [...pointers].find(([id]) => id !== event.pointerId)[1];
      const [was, is] = [Math.abs(before.x - other.x), Math.abs(now.x - other.x)];
      if (was > 8 && is > 8) view.zoom(is / was, timeAt(other.x));
    }
    pointers.set(event.pointerId, now);
  });
  const release = (event) => {
    if (pointers.delete(event.pointerId) && event.type === "pointerup" && moved <= 4) actions.tap(place(event));
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => actions.leave());
  canvas.addEventListener("keydown", (event) => {
    const keys = {
      ArrowLeft: () => view.pan(-0.15), ArrowRight: () => view.pan(0.15),
      ArrowUp: () => view.zoom(1.5), "+": () => view.zoom(1.5), "=": () => view.zoom(1.5),
      ArrowDown: () => view.zoom(1 / 1.5), "-": () => view.zoom(1 / 1.5),
      Home: () => view.reset(), 0: () => view.reset(),
      n: () => actions.next(1), p: () => actions.next(-1), Escape: () => actions.tap(null),
    };
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    keys[event.key]();
    event.preventDefault();
  });
}

// A canvas in the pixels of the screen; returns its context in CSS pixels.
function prepareCanvas(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.parentElement.clientWidth;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "12px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
  context.textBaseline = "middle";
  return { context, width };
}

// Round numbers between two, at most so many.
function ticks(start, end, count) {
  const rough = (end - start) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((part) => part * power).find((size) => size >= rough * 0.999);
  const found = [];
  for (let number = Math.ceil(start / step - 1e-9); number * step <= end * (1 + 1e-12); number += 1) found.push(number * step);
  return { found, step };
}
