"use strict";
// Words and figures, elements, colours.

function showUs(us) {
  if (us >= 1e6) return (us / 1e6).toFixed(3) + " s";
  if (us >= 1e3) return (us / 1e3).toFixed(3) + " ms";
  return us.toFixed(3) + " µs";
}

const showNs = (ns) => showUs(ns / 1000);

const UNITS = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];

function showBytes(nbytes) {
  for (const [name, unit] of UNITS) {
    if (nbytes >= unit) return (nbytes / unit).toFixed(2) + " " + name;
  }
  return nbytes + " B";
}

const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

/** An element; strings among the children become text, never markup. */
function el(tag, given = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(made.style, value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const byId = (id) => document.getElementById(id);

/** Where the running sums of `steps` stand. */
function sums(steps) {
  const found = new Float64Array(steps.length);
  let at = 0;
  for (let i = 0; i < steps.length; i++) found[i] = at += steps[i];
  return found;
}

/** The first place at which `values`, in order, exceed `wanted`. */
function firstAbove(values, wanted) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > wanted) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** Round marks over a range: multiples of 1, 2 or 5 × 10ⁿ units, at most `most`. */
function marks(from, to, most, unit = 1) {
  const rough = (to - from) / unit / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((m) => m * power >= rough) * power * unit;
  const found = [];
  for (let i = Math.ceil(from / step); i * step <= to; i++) found.push(i * step);
  return found;
}

// --- colours: those of page.css, as the theme has them --------------------------------------

const BANDS = [
  ["weight", "weight"], ["optimizer state", "state"], ["gradient", "gradient"],
  ["activation", "activation"], ["input/output", "io"], ["workspace", "workspace"],
];
const VARIABLE = { ...Object.fromEntries(BANDS), temporary: "workspace", input: "io", output: "io" };
const variableOf = (what) => VARIABLE[what] ?? what;

const colours = new Map();

function colour(what) {
  const name = variableOf(what);
  if (!colours.has(name)) {
    const probe = el("i", { style: { color: `var(--${name})` } });
    document.body.append(probe);
    colours.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return colours.get(name);
}

/** Ink that is legible on a colour. */
function inkOn(fill) {
  const [r, g, b] = fill.match(/[\d.]+/g).map((v) => (Number(v) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.2 ? "#101418" : "#ffffff";
}

/** The colour with stripes, for what is not colour alone. */
function hatched(context, fill) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const pen = tile.getContext("2d");
  pen.fillStyle = fill;
  pen.fillRect(0, 0, 8, 8);
  pen.strokeStyle = colour("panel");
  pen.lineWidth = 1.6;
  for (const x of [-8, 0, 8]) {
    pen.beginPath();
    pen.moveTo(x, 8);
    pen.lineTo(x + 8, 0);
    pen.stroke();
  }
  return context.createPattern(tile, "repeat");
}

const swatch = (what, striped) =>
  el("span", { class: striped ? "swatch hatched" : "swatch", style: { backgroundColor: `var(--${variableOf(what)})` } });
