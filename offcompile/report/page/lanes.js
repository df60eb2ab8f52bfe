// The lanes as a Gantt chart: planned above measured, waits in a colour of their own.

const TITLE = 19, BAR = 20, UNDER = 13, REST = 12;

/** Start and end of every span, in order. */
function prepareLanes(report) {
  for (const lane of report.lanes) {
    for (const rows of [lane.planned, lane.measured]) {
      if (!rows) continue;
      const shorter = rows === lane.measured ? app.stretch : 1;
      rows.starts = sums(rows.start).map((start) => start / shorter);
      rows.ends = rows.starts.map((start, i) => start + rows.duration[i] / shorter);
    }
  }
}

const laneHeight = () => TITLE + BAR + (app.report.measured_ns === null ? 0 : UNDER + 2) + REST;

/** Every bar row: its lane, whose it is, where it stands. */
function barRows() {
  return app.report.lanes.flatMap((lane, i) => {
    const top = i * laneHeight() + TITLE;
    const rows = [{ lane: i, by: "planned", rows: lane.planned, top, height: BAR }];
    if (lane.measured) rows.push({ lane: i, by: "measured", rows: lane.measured, top: top + BAR + 2, height: UNDER });
    return rows;
  });
}

/** [start, duration, op, what for] of each wait in a row of bars, as drawn. */
function stallsOf(row) {
  if (app.report.lanes[row.lane].lane !== "compute") return [];
  const stalls = app.report.stalls[row.by];
  if (row.by === "planned" || app.stretch === 1) return stalls;
  return stalls.map(([start, duration, ...rest]) => [start / app.stretch, duration / app.stretch, ...rest]);
}

function drawLanes() {
  const height = app.report.lanes.length * laneHeight() + 22;
  const drawing = pen(byId("lanes"), height);
  const { context, width } = drawing;
  drawTimes(drawing, 0, height - 22);
  context.fillStyle = colour("panel");
  app.report.lanes.forEach((lane, i) => {
    const rate = app.report.rates.find((r) => r.lane === lane.lane);
    const about = rate ? [rate.way, rate.rate.split(" after ")[0], `busy ${(100 * rate.busy).toFixed(0)}%`] : [];
    const said = about.filter(Boolean).join(" · ");
    const middle = i * laneHeight() + TITLE / 2;
    context.font = context.font.replace(/^/, "600 ");
    const wide = context.measureText(lane.lane).width;
    tag(context, lane.lane, 3, middle);
    context.font = context.font.replace(/^(600|bold) /, "");
    tag(context, said, wide + 12, middle, "soft");
  });
  const waiting = hatched(context, colour("wait"));
  for (const row of barRows()) {
    context.fillStyle = colour("sunk");
    context.globalAlpha = 0.6;
    context.fillRect(0, row.top, width, row.height);
    context.globalAlpha = 1;
    drawBars(drawing, row);
    let reached = -9;
    for (const [start, duration] of stallsOf(row)) {
      const left = drawing.x(start), right = drawing.x(start + duration);
      if (right < 0 || left > width) continue;
      context.fillStyle = right - left > 5 ? waiting : colour("wait");
      // short ones can be seen where they stand alone; where they are many, their share is true
      const least = left - reached > 4 ? 1.5 : 0;
      reached = left + Math.max(least, right - left);
      context.fillRect(left, row.top, reached - left, row.height);
    }
  }
  drawChosen(drawing);
  drawHover(drawing, 0, height - 22);
}

function drawBars({ context, width, x }, { rows, top, height, by }) {
  let reached = -1;
  const things = app.report.things;
  for (let i = firstAbove(rows.ends, app.from); i < rows.starts.length; i++) {
    const left = Math.max(-2, x(rows.starts[i]));
    if (left > width) break;
    const right = Math.min(width + 2, x(rows.ends[i]));
    // many to a pixel: one of them is enough
    if (right - reached < 0.6) continue;
    reached = Math.max(right, left + 0.8);
    const [id, label, what, kind] = things[rows.thing[i]];
    const fill = colour(kind);
    context.fillStyle = fill;
    const gap = right - left > 3 ? 1 : 0;
    context.globalAlpha = by === "measured" ? 0.82 : 1;
    context.fillRect(left, top, Math.max(0.8, right - left - gap), height);
    context.globalAlpha = 1;
    if (what.endsWith("run again")) {
      context.fillStyle = colour("ink");
      context.fillRect(left, top + height - 3, Math.max(0.8, right - left - gap), 3);
    }
    const shown = Math.max(left, 0), room = Math.min(right, width) - shown - 8;
    if (room > 34) {
      context.fillStyle = inkOn(fill);
      const said = fitted(context, label || id, room);
      context.fillText(said, shown + 4, top + height / 2 + 0.5);
    }
  }
}

/** As much of the words as there is room for; their end says most. */
function fitted(context, said, room) {
  if (context.measureText(said).width <= room) return said;
  const letters = Math.floor(room / 7) - 1;
  return letters < 6 ? "" : `…${said.slice(-letters)}`;
}

// --- what is chosen ----------------------------------------------------------------------------

/** {row, start, end, stall or thing} at the place of an event; null: nothing is there. */
function hit(canvas, event) {
  const box = canvas.getBoundingClientRect();
  const ns = timeAt(canvas, event), y = event.clientY - box.top;
  const near = ((app.to - app.from) / box.width) * 2;
  const row = barRows().find((r) => y >= r.top - 1 && y <= r.top + r.height + 1);
  if (!row) return null;
  const stall = stallsOf(row).findIndex(([start, duration]) => ns >= start - near / 2 && ns <= start + duration + near / 2);
  if (stall >= 0) return stallAt(row, stall);
  const after = firstAbove(row.rows.starts, ns);
  const place = [after - 1, after].find((i) => i >= 0 && row.rows.ends[i] >= ns - near && row.rows.starts[i] <= ns + near);
  return place === undefined || place >= row.rows.starts.length ? null : spanAt(row, place);
}

function spanAt(row, place) {
  const { starts, ends, thing } = row.rows;
  return { lane: row.lane, by: row.by, place, start: starts[place], end: ends[place], thing: app.report.things[thing[place]] };
}

function stallAt(row, place) {
  const [start, duration, op, what] = stallsOf(row)[place];
  return { lane: row.lane, by: row.by, stall: place, start, end: start + duration, op, what };
}

function about(found) {
  const longer = found.by === "measured" ? app.stretch : 1;
  const [start, end] = [found.start * longer, found.end * longer];
  const when = `${showNs(start)} to ${showNs(end)} (${showNs(end - start)}), ${found.by}`;
  if (found.stall !== undefined) return [`Waiting before ${found.op}`, `for: ${found.what}`, when];
  const [id, label, what, , tensor, nbytes] = found.thing;
  const size = nbytes ? `, ${showBytes(nbytes)}${tensor ? "" : " of workspace"}` : "";
  return [label || id, `${label ? `${id}: ` : ""}${what}${size}`, when];
}

function choose(found) {
  app.chosen = found;
  const [title, ...rest] = found ? about(found) : [];
  const tensor = found?.thing?.[4];
  byId("chosen").replaceChildren(
    ...(found
      ? [
          el("b", {}, title),
          ...rest.map((said) => el("span", {}, said)),
          tensor ? el("button", { type: "button", onclick: () => goToTensor(tensor) }, "Show in the table") : null,
        ].filter(Boolean)
      : ["Press a bar to see what it is and where its tensor stands in the table."]),
  );
  pickTensor(tensor ?? null);
  redraw();
}

function drawChosen({ context, x }) {
  if (!app.chosen || app.printing) return;
  const row = barRows().find((r) => r.lane === app.chosen.lane && r.by === app.chosen.by);
  const left = x(app.chosen.start), right = Math.max(left + 2, x(app.chosen.end));
  context.strokeStyle = colour("ink");
  context.lineWidth = 2;
  context.strokeRect(left - 1, row.top - 1, right - left + 1, row.height + 2);
}

/** The next span of the lane, or the one of another row at the same time. */
function stepSpan(along, across) {
  const rows = barRows().filter((r) => r.rows.starts.length);
  if (!rows.length) return;
  const was = app.chosen;
  let at = was ? rows.findIndex((r) => r.lane === was.lane && r.by === was.by) : 0;
  at = was ? (at + across + rows.length) % rows.length : 0;
  const row = rows[at], time = was ? was.start : app.from;
  const here = along && was?.place !== undefined ? was.place + along : firstAbove(row.rows.starts, time) - (across ? 1 : 0);
  const found = spanAt(row, Math.min(Math.max(here, 0), row.rows.starts.length - 1));
  choose(found);
  reveal(found.start, found.end);
}

/** The next wait after what is chosen, planned ones and measured ones in order of time. */
function nextWait(direction) {
  const rows = barRows().filter((r) => stallsOf(r).length);
  const every = rows.flatMap((r) => stallsOf(r).map((_, i) => stallAt(r, i))).sort((a, b) => a.start - b.start);
  if (!every.length) return;
  const same = every.findIndex((s) => app.chosen && s.by === app.chosen.by && s.stall === app.chosen.stall);
  const first = direction > 0 ? 0 : every.length - 1;
  const found = every[same < 0 ? first : (same + direction + every.length) % every.length];
  choose(found);
  reveal(found.start, found.end);
}

function fillLanes() {
  const report = app.report;
  prepareLanes(report);
  const waits = report.stalls.planned.length + report.stalls.measured.length;
  byId("next-wait").disabled = !waits;
  const kinds = new Set();
  for (const lane of report.lanes) {
    for (const rows of [lane.planned, lane.measured]) rows?.thing.forEach((i) => kinds.add(report.things[i][3]));
  }
  const items = [...kinds].map((kind) => el("li", {}, swatch(kind), kind));
  if (waits) items.push(el("li", {}, swatch("wait", true), "compute waits"));
  byId("phases").replaceChildren(...items);
  const times = app.stretch.toFixed(2);
  const shorter = app.stretch === 1 ? "" : `, drawn ${times} × shorter than they were, so that both steps line up`;
  const both = report.measured_ns === null ? "" : `Upper bars are planned, lower ones measured${shorter}. `;
  byId("line-up").hidden = (report.measured_ns ?? 0) <= report.step_ns;
  byId("line-up").setAttribute("aria-pressed", String(app.stretch !== 1));
  const keys = [["pan", "←", "→"], ["zoom", "+", "−"], ["whole", "0"], ["next wait", "n"], ["bar by bar", ",", "."], ["by lane", "↑", "↓"]];
  byId("lanes-hint").replaceChildren(
    `${both}Drag to pan; pinch, or press the chart and scroll, to zoom. `,
    el("span", { class: "keys" }, "Keys: ",
      ...keys.flatMap(([what, ...caps], i) => [i ? ", " : "", ...caps.flatMap((cap) => [el("kbd", {}, cap), " "]), what]), "."));
  byId("lanes").setAttribute(
    "aria-label",
    `What runs when on ${count(report.lanes.length, "lane")}, with ${count(waits, "wait")}. The tables below say the same in words.`,
  );
}
