// The time shown, which both charts share, and what steers it.

const app = { report: null, tier: 0, from: 0, to: 1, hover: null, chosen: null, printing: false, stretch: 1 };
const PAPER_WIDTH = 800;

/** A measured step far longer than planned is drawn shorter by `app.stretch`, so that both line up. */
const LINED_UP = 1.5;
const endOf = (report) => Math.max(report.step_ns, (report.measured_ns ?? 0) / app.stretch, 1);

let queued = false;

/** Draw both charts before the next frame, however often this is asked. */
function redraw() {
  if (queued) return;
  queued = true;
  requestAnimationFrame(() => {
    queued = false;
    drawAll();
  });
}

function drawAll() {
  drawMemory();
  drawLanes();
}

/** Show a stretch of time: not beyond the step, and not less than 100 ns. */
function show(from, to) {
  const whole = endOf(app.report);
  const length = Math.min(whole, Math.max(to - from, 100));
  app.from = Math.min(Math.max(0, from), whole - length);
  app.to = app.from + length;
  redraw();
}

const showWhole = () => show(0, endOf(app.report));

function zoom(factor, at = (app.from + app.to) / 2) {
  show(at - (at - app.from) * factor, at + (app.to - at) * factor);
}

const pan = (share) => {
  const length = app.to - app.from;
  show(app.from + share * length, app.to + share * length);
};

/** Bring a span into sight, with room about it; what is in sight stays put. */
function reveal(start, end) {
  const length = app.to - app.from;
  if (start >= app.from && end <= app.to && (end - start) * 400 > length) return;
  const wanted = Math.min(Math.max((end - start) * 8, 1), endOf(app.report));
  const middle = (start + end) / 2;
  show(middle - wanted / 2, middle + wanted / 2);
}

// --- canvases ----------------------------------------------------------------------------------

/** The pen of a canvas that is `height` high and as wide as its place. */
function pen(canvas, height) {
  const width = app.printing ? PAPER_WIDTH : Math.max(1, canvas.clientWidth);
  const scale = app.printing ? 2 : window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = app.printing ? "auto" : `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  context.textBaseline = "middle";
  return { context, width, height, x: (ns) => ((ns - app.from) / (app.to - app.from)) * width };
}

const timeAt = (canvas, event) => {
  const box = canvas.getBoundingClientRect();
  return app.from + ((event.clientX - box.left) / box.width) * (app.to - app.from);
};

/** Lines for round times, and what they say below `bottom`. */
function drawTimes({ context, width, x }, top, bottom) {
  const length = app.to - app.from;
  const [unit, name] = length >= 2e9 ? [1e9, "s"] : length >= 2e6 ? [1e6, "ms"] : length >= 2e3 ? [1e3, "µs"] : [1, "ns"];
  const times = marks(app.from, app.to, width / 90, unit);
  const digits = times.length > 1 ? Math.max(0, -Math.floor(Math.log10((times[1] - times[0]) / unit) + 1e-9)) : 0;
  context.lineWidth = 1;
  for (const ns of times) {
    const at = Math.round(x(ns)) + 0.5;
    context.strokeStyle = colour("line");
    context.beginPath();
    context.moveTo(at, top);
    context.lineTo(at, bottom);
    context.stroke();
    context.fillStyle = colour("soft");
    const said = `${(ns / unit).toFixed(digits)} ${name}`;
    const wide = context.measureText(said).width;
    context.fillText(said, Math.min(Math.max(0, at - wide / 2), width - wide), bottom + 11);
  }
}

function drawHover({ context, x, width }, top, bottom) {
  if (app.hover === null || app.printing) return;
  const at = Math.round(x(app.hover)) + 0.5;
  if (at < 0 || at > width) return;
  context.strokeStyle = colour("ink");
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(at, top);
  context.lineTo(at, bottom);
  context.stroke();
}

// --- wheel, pinch, drag, keys ------------------------------------------------------------------

function steer(canvas, { over = () => {}, pressed = () => {}, key = () => false } = {}) {
  const fingers = new Map();
  let travelled = 0;
  canvas.addEventListener(
    "wheel",
    (event) => {
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        event.preventDefault();
        pan(event.deltaX / canvas.clientWidth);
      } else if (event.ctrlKey || event.metaKey || document.activeElement === canvas) {
        event.preventDefault();
        zoom(Math.exp(Math.max(-120, Math.min(120, event.deltaY)) / (event.ctrlKey ? 80 : 320)), timeAt(canvas, event));
      }
    },
    { passive: false },
  );
  canvas.addEventListener("pointerdown", (event) => {
    fingers.set(event.pointerId, event.clientX);
    canvas.setPointerCapture(event.pointerId);
    travelled = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    const was = fingers.get(event.pointerId);
    if (was === undefined) {
      app.hover = timeAt(canvas, event);
      over(event);
      redraw();
      return;
    }
    const before = [...fingers.values()];
    fingers.set(event.pointerId, event.clientX);
    const now = [...fingers.values()];
    travelled += Math.abs(event.clientX - was);
    if (now.length === 1) pan((was - event.clientX) / canvas.clientWidth);
    else {
      const spread = (xs) => Math.max(20, Math.abs(xs[0] - xs[1]));
      const middle = { clientX: (now[0] + now[1]) / 2 };
      zoom(spread(before) / spread(now), timeAt(canvas, middle));
    }
    over(null);
  });
  const up = (event) => {
    const held = fingers.delete(event.pointerId);
    if (held && event.type === "pointerup" && travelled < 4) pressed(event);
  };
  canvas.addEventListener("pointerup", up);
  canvas.addEventListener("pointercancel", up);
  canvas.addEventListener("pointerleave", () => {
    app.hover = null;
    over(null);
    redraw();
  });
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const act = KEYS[event.key];
    if (!key(event) && act) act();
    else if (!act) return;
    event.preventDefault();
  });
}

const KEYS = {
  ArrowLeft: () => pan(-0.15),
  ArrowRight: () => pan(0.15),
  "+": () => zoom(1 / 1.6),
  "=": () => zoom(1 / 1.6),
  "-": () => zoom(1.6),
  0: showWhole,
  Home: showWhole,
  n: () => nextWait(1),
  p: () => nextWait(-1),
  ArrowDown: () => stepSpan(0, 1),
  ArrowUp: () => stepSpan(0, -1),
  ".": () => stepSpan(1, 0),
  ",": () => stepSpan(-1, 0),
  Escape: () => choose(null),
};
