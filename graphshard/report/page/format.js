// Numbers with units that people read.

function digits(value, count) {
  if (value === 0) return "0";
  const places = Math.max(0, count - 1 - Math.floor(Math.log10(Math.abs(value))));
  return value.toLocaleString("en-US", { minimumFractionDigits: Math.min(places, 3), maximumFractionDigits: Math.min(places, 3) });
}

function timeText(seconds, count = 3) {
  const size = Math.abs(seconds);
  if (size >= 1) return `${digits(seconds, count)} s`;
  if (size >= 1e-3) return `${digits(seconds * 1e3, count)} ms`;
  return size === 0 ? "0 ms" : `${digits(seconds * 1e6, count)} µs`;
}

function sizeText(bytes, count = 3) {
  for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (Math.abs(bytes) >= size) return `${digits(bytes / size, count)} ${unit}`;
  }
  return `${Math.round(bytes)} B`;
}

function rateText(bytesPerSecond) {
  return `${digits(bytesPerSecond / 1e9, 3)} GB/s`;
}

function percent(share) {
  return `${(100 * share).toFixed(1)} %`;
}

function factorText(factor) {
  return `×${factor < 0.995 ? factor.toPrecision(2) : digits(factor, 3)}`;
}

function kindText(kind) {
  return kind.replaceAll("_", "-");
}

// An element with text and attributes; children are elements or text.
function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
