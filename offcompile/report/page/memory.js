// Memory over the step: what a tier holds, stacked by kind, against its limit.

const MEMORY_HEIGHT = 250;

/** Running sums of a tier's changes: `at[i]` holds from `times[i]` on, one value for each band. */
function levelsOf(tier) {
  const times = sums(tier.t), wide = BANDS.length, n = times.length;
  const levels = new Float64Array((n + 1) * wide), totals = new Float64Array(n + 1);
  const now = [...tier.base];
  for (let i = 0; i <= n; i++) {
    if (i > 0) now[tier.k[i - 1]] += tier.d[i - 1];
    levels.set(now, i * wide);
    totals[i] = now.reduce((a, b) => a + b, 0);
  }
  return { times, levels, totals, at: (i) => levels.subarray(i * wide, (i + 1) * wide) };
}

const tierNow = () => app.report.memory[app.tier];

/** Where the most is held. */
function fullest({ totals }) {
  let best = 0;
  for (let i = 1; i < totals.length; i++) if (totals[i] > totals[best]) best = i;
  return best;
}

/** For each column of the drawing, the place with the most in that stretch of time. */
function columnsOf({ times, totals }, width) {
  const found = new Uint32Array(width);
  const each = (app.to - app.from) / width;
  let place = firstAbove(times, app.from);
  for (let column = 0; column < width; column++) {
    const until = app.from + (column + 1) * each;
    let best = place;
    while (place < times.length && times[place] < until) {
      place++;
      if (totals[place] > totals[best]) best = place;
    }
    found[column] = best;
  }
  return found;
}

function drawMemory() {
  const tier = tierNow();
  if (!tier) return;
  tier.found ??= levelsOf(tier);
  const canvas = byId("memory");
  const drawing = pen(canvas, MEMORY_HEIGHT);
  const { context, width, x } = drawing;
  const top = 8, bottom = MEMORY_HEIGHT - 22;
  const most = tier.found.totals[fullest(tier.found)] + tier.reserve + tier.holes;
  // a limit far above what is held would leave nothing to see
  const inSight = tier.limit !== null && tier.limit <= most * 2.5;
  const scale = Math.max(1, inSight ? Math.max(tier.limit, most) : most) * 1.1;
  const y = (nbytes) => bottom - (nbytes / scale) * (bottom - top);

  drawTimes(drawing, top, bottom);
  const end = Math.min(width, Math.ceil(x(app.report.step_ns)));
  const columns = columnsOf(tier.found, Math.ceil(width)).subarray(0, Math.max(0, end));
  const wide = BANDS.length, heights = new Float64Array(columns.length).fill(tier.reserve);
  const layer = (fill, add) => {
    const before = Float64Array.from(heights);
    let any = false;
    for (let c = 0; c < columns.length; c++) {
      const more = add(columns[c]);
      any ||= more > 0;
      heights[c] += more;
    }
    if (!any) return;
    context.fillStyle = fill;
    context.beginPath();
    context.moveTo(0, y(before[0]));
    for (let c = 0; c < columns.length; c++) {
      context.lineTo(c, y(heights[c]));
      context.lineTo(c + 1, y(heights[c]));
    }
    for (let c = columns.length - 1; c >= 0; c--) {
      context.lineTo(c + 1, y(before[c]));
      context.lineTo(c, y(before[c]));
    }
    context.fill();
  };
  if (tier.reserve) {
    context.fillStyle = hatched(context, colour("aside"));
    context.fillRect(0, y(tier.reserve), end, bottom - y(tier.reserve));
  }
  BANDS.forEach(([, name], band) => layer(colour(name), (i) => tier.found.levels[i * wide + band]));
  if (tier.holes) layer(hatched(context, colour("aside")), () => tier.holes);

  drawScale(drawing, y, scale, inSight ? y(tier.limit) : null);
  drawLimit(drawing, tier, inSight ? y(tier.limit) : null);
  drawHover(drawing, top, bottom);
  sayMoment();
}

function drawScale({ context, width }, y, scale, limit) {
  const [name, unit] = UNITS.find(([, u]) => scale >= u * 1.5) ?? ["B", 1];
  context.lineWidth = 1;
  for (const nbytes of marks(0, scale, 4, unit)) {
    if (!nbytes) continue;
    const at = Math.round(y(nbytes)) + 0.5;
    // neither above the drawing nor on the line of the limit
    if (at < 14 || (limit !== null && Math.abs(at - limit) < 12)) continue;
    context.globalAlpha = 0.45;
    context.strokeStyle = colour("soft");
    context.setLineDash([1, 4]);
    context.beginPath();
    context.moveTo(0, at);
    context.lineTo(width, at);
    context.stroke();
    context.setLineDash([]);
    context.globalAlpha = 1;
    tag(context, `${+(nbytes / unit).toPrecision(6)} ${name}`, 4, at);
  }
}

/** Words on a ground of their own, so that they are legible on any colour. */
function tag(context, said, left, middle, ink = "ink") {
  const wide = context.measureText(said).width;
  context.globalAlpha = 0.86;
  context.fillStyle = colour("panel");
  context.fillRect(left - 3, middle - 8, wide + 6, 16);
  context.globalAlpha = 1;
  context.fillStyle = colour(ink);
  context.fillText(said, left, middle + 0.5);
}

function drawLimit({ context, width }, tier, at) {
  if (tier.limit === null) return;
  const word = tier.tier === "device" ? "budget" : "limit";
  const said = `${word} ${showBytes(tier.limit)}${at === null ? ", far above this scale" : ""}`;
  if (at !== null) {
    context.strokeStyle = colour("wait");
    context.lineWidth = 1.5;
    context.setLineDash([7, 4]);
    context.beginPath();
    context.moveTo(0, at);
    context.lineTo(width, at);
    context.stroke();
    context.setLineDash([]);
  }
  const left = width - context.measureText(said).width - 4;
  tag(context, said, left, at === null ? 16 : Math.max(10, at - 10), "wait-ink");
}

/** The moment under the pointer, or where the most is held: when, in which op, how much. */
function sayMoment() {
  const tier = tierNow(), found = tier.found;
  const held = app.hover !== null && app.hover <= app.report.step_ns;
  const place = held ? firstAbove(found.times, app.hover) : fullest(found);
  const ns = held ? app.hover : place > 0 ? found.times[place - 1] : 0;
  const set = tier.reserve + tier.holes;
  const total = showBytes(found.totals[place] + set);
  const of = tier.limit === null ? "" : ` of ${showBytes(tier.limit)}`;
  const op = opAt(ns);
  byId("moment").replaceChildren(
    held ? `At ${showNs(ns)}: ` : "Fullest at ", held ? "" : `${showNs(ns)}: `, el("b", {}, total + of),
    op ? ` in ${op}` : "",
  );
  const levels = found.at(place);
  for (const item of byId("bands").children) {
    const band = item.dataset.band;
    const nbytes = band === "reserve" ? tier.reserve : band === "holes" ? tier.holes : levels[Number(band)];
    item.querySelector(".much").textContent = showBytes(nbytes);
  }
}

function opAt(ns) {
  const compute = app.report.lanes.find((lane) => lane.lane === "compute");
  if (!compute) return "";
  const place = firstAbove(compute.planned.starts, ns) - 1;
  if (place < 0 || compute.planned.ends[place] <= ns) return "";
  const [id, label] = app.report.things[compute.planned.thing[place]];
  return label ? `${id} (${label})` : id;
}

function fillTiers() {
  const tiers = app.report.memory;
  byId("tiers").hidden = tiers.length < 2;
  byId("tiers").replaceChildren(
    ...tiers.map((tier, i) =>
      el("button", { type: "button", "aria-pressed": String(i === app.tier), onclick: () => showTier(i) }, tier.tier),
    ),
  );
  const tier = tierNow();
  const held = tier.found ??= levelsOf(tier);
  const item = (band, name, what, striped) =>
    el("li", { "data-band": band }, swatch(what, striped), name, el("span", { class: "much" }));
  const items = [];
  if (tier.reserve) items.push(item("reserve", "runtime's reserve", "aside", true));
  BANDS.forEach(([name, what], band) => {
    for (let i = 0; i < held.totals.length; i++) {
      if (held.levels[i * BANDS.length + band] > 0) {
        items.push(item(band, name, what));
        break;
      }
    }
  });
  if (tier.holes) items.push(item("holes", "left to holes", "aside", true));
  byId("bands").replaceChildren(...items);
  const limit = tier.limit === null ? "no limit" : `a limit of ${showBytes(tier.limit)}`;
  byId("memory").setAttribute(
    "aria-label",
    `Bytes held on the ${tier.tier} over the step, by kind: at most ${showBytes(tier.peak)}, ${limit}. ` +
      "Arrow keys pan, plus and minus zoom, 0 shows the whole step.",
  );
}

function showTier(i) {
  app.tier = i;
  fillTiers();
  byId("tiers").children[i].focus();
  redraw();
}
