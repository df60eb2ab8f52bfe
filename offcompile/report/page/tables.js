// Tables: waits, certificate, and modules with their tensors.

const WAITS_SHOWN = 10, TENSORS_SHOWN = 60;

// --- where the time goes -----------------------------------------------------------------------

function fillWaits() {
  const { said, steps, rows } = app.report.waits;
  const longest = Math.max(...Object.values(steps).map(([step]) => step), 1);
  const parts = [];
  for (const by of ["planned", "measured"]) {
    if (!steps[by]) continue;
    const [step, compute] = steps[by];
    parts.push(
      el("p", { class: "said" }, el("b", {}, `${by === "planned" ? "Planned" : "Measured"}: `), said[by]),
      el("div", { class: "split", "aria-hidden": "true", style: { width: `${(100 * step) / longest}%` } },
        el("i", { style: { width: `${(100 * compute) / step}%`, background: "var(--backward)" } }),
        el("i", { class: "hatched", style: { width: `${(100 * (step - compute)) / step}%`, backgroundColor: "var(--wait)" } })),
    );
  }
  if (!rows.length) parts.push(el("p", { class: "hint" }, "No operation waits for a move: what moves, moves beside the computing."));
  else parts.push(waitTable(rows, "measured" in steps));
  byId("waits").replaceChildren(...parts);
}

function waitTable(rows, measured) {
  const head = ["Waiting for", "", "Planned", measured ? "Measured" : null].filter((h) => h !== null);
  const row = ([what, how, tensor, planned, seen]) =>
    el("tr", {},
      el("td", {}, tensor ? el("button", { type: "button", class: "link", onclick: () => goToTensor(tensor) }, what) : what),
      el("td", { class: "soft" }, how),
      el("td", { class: "number" }, planned ? showNs(planned) : "–"),
      measured ? el("td", { class: "number" }, seen ? showNs(seen) : "–") : null);
  const body = el("tbody", {}, ...rows.slice(0, WAITS_SHOWN).map(row));
  const table = el("table", {},
    el("caption", {}, "Waits by tensor, the largest first"),
    el("thead", {}, el("tr", {}, ...head.map((h, i) => el("th", { scope: "col", class: i > 1 ? "number" : null }, h || el("span", { "aria-label": "way" }))))),
    body);
  if (rows.length <= WAITS_SHOWN) return table;
  return el("div", {}, table, moreButton(rows.length - WAITS_SHOWN, "more wait", () => body.append(...rows.slice(WAITS_SHOWN).map(row))));
}

function moreButton(n, noun, act) {
  const button = el("button", { type: "button", class: "more" }, `Show ${count(n, noun)}`);
  button.addEventListener("click", () => {
    act();
    button.remove();
  });
  return button;
}

// --- certificate -------------------------------------------------------------------------------

function fillCertificate() {
  byId("certificate").replaceChildren(
    ...app.report.certificate.flatMap(([name, told]) => [el("dt", {}, name), el("dd", {}, told)]));
  const cells = ({ lane, way, rate, busy }) =>
    el("tr", {}, el("td", { class: "mono" }, lane), el("td", {}, way), el("td", {}, rate || "–"),
      el("td", { class: "number" }, `${(100 * busy).toFixed(0)}%`));
  byId("rates").replaceChildren(
    el("caption", {}, "The machine it was planned for"),
    el("thead", {}, el("tr", {}, ...["Lane", "Way", "Rate", "Busy"].map((h, i) => el("th", { scope: "col", class: i === 3 ? "number" : null }, h)))),
    el("tbody", {}, ...app.report.rates.map(cells)));
  // beside the longer of the two
  const few = app.report.waits.rows.length < 3;
  (few ? byId("waits").parentElement : byId("certificate").parentElement).append(byId("rates"));
}

// --- what was split, and simpler ways ------------------------------------------------------------

function fillChanges() {
  const { split, ways } = app.report;
  byId("changes").hidden = !split && !ways.length;
  byId("split").hidden = !split;
  byId("ways").hidden = !ways.length;
  if (split) {
    byId("parts").replaceChildren(...split.parts.map((said) => el("li", {}, said)));
    fillColumns("before-after", ["", "Whole", "In pieces"], split.rows);
  }
  if (ways.length) fillColumns("simple-ways", ["Way", "Step", "Does not fit"], ways);
}

function fillColumns(id, head, rows) {
  byId(id).replaceChildren(
    el("thead", {}, el("tr", {}, ...head.map((h) => el("th", { scope: "col" }, h || el("span", { "aria-label": "figure" }))))),
    el("tbody", {}, ...rows.map((cells) => el("tr", {}, ...cells.map((cell) => el("td", {}, cell || "–"))))));
}

// --- modules -----------------------------------------------------------------------------------

const COLUMNS = [
  ["name", "Module, and how it is treated", "c-name", ""],
  ["holds", "Holds", "c-holds", "wide"],
  ["nbytes", "Bytes", "c-bytes", "number"],
  ["cost_us", "Step longer by", "c-cost", "number"],
  ["lane_us", "On lanes", "c-lane", "number wide"],
  ["why", "Why", "c-why", "wide paper"],
];
const order = { by: "cost_us", down: true };
const unfolded = new Set();
let picked = null;

const sortable = (name) => name !== "holds" && name !== "why";
const matches = (module, wanted) =>
  !wanted || [module.name, ...module.what].some((s) => s.toLowerCase().includes(wanted)) ||
  module.tensors.some((t) => tensorMatches(t, wanted));
const tensorMatches = (tensor, wanted) =>
  [tensor.id, tensor.label, tensor.kind, tensor.what].some((s) => s.toLowerCase().includes(wanted));

function sortedModules() {
  const found = [...app.report.modules];
  if (order.by === "cost_us" && order.down) return found;
  const key = order.by, sign = order.down ? -1 : 1;
  const compare = key === "name"
    ? (a, b) => a.name.localeCompare(b.name, "en", { numeric: true })
    : (a, b) => a[key] - b[key];
  return found.sort((a, b) => sign * compare(a, b));
}

function fillModules() {
  const wanted = byId("search").value.trim().toLowerCase();
  const shown = sortedModules().filter((module) => matches(module, wanted));
  const tensors = app.report.modules.reduce((n, module) => n + module.tensors.length, 0);
  byId("found").textContent = wanted
    ? `${count(shown.length, "module")} of ${app.report.modules.length} match “${wanted}”`
    : `${count(shown.length, "module")}, ${count(tensors, "tensor")}. Press a module to see its tensors.`;
  const header = COLUMNS.map(([name, said, , cls]) => {
    const sort = order.by === name ? (order.down ? "descending" : "ascending") : null;
    const inside = sortable(name) ? el("button", { type: "button", "data-sort": name, onclick: () => sortBy(name) }, said) : said;
    return el("th", { scope: "col", class: cls || null, "aria-sort": sort }, inside);
  });
  byId("modules").replaceChildren(
    el("colgroup", {}, ...COLUMNS.map(([, , column, cls]) => el("col", { class: `${column} ${cls.replace("number", "")}` }))),
    el("thead", {}, el("tr", {}, ...header)),
    el("tbody", {}, ...shown.flatMap((module) => moduleRows(module, wanted))));
}

function sortBy(name) {
  order.down = order.by === name ? !order.down : name !== "name";
  order.by = name;
  fillModules();
  document.querySelector(`[data-sort="${name}"]`).focus();
}

function moduleRows(module, wanted) {
  const open = unfolded.has(module.name);
  const fold = el("button", { type: "button", class: "fold", "aria-expanded": String(open) }, module.name);
  const most = Math.max(...app.report.modules.map((m) => m.nbytes), 1);
  const bar = el("div", {
    class: "holds", style: { width: `${(100 * module.nbytes) / most}%` },
    title: module.holds.map(([kind, nbytes]) => `${kind} ${showBytes(nbytes)}`).join(", "),
  }, ...module.holds.map(([kind, nbytes]) => el("i", { style: { flex: String(Math.max(1, nbytes)), background: `var(--${variableOf(kind)})` } })));
  const ways = module.what.slice(0, 2).join("; ") + (module.what.length > 2 ? `; and ${module.what.length - 2} more` : "");
  const row = el("tr", {},
    el("td", {}, fold, el("div", { class: "how" }, ways)),
    el("td", { class: "wide" }, bar),
    el("td", { class: "number" }, showBytes(module.nbytes)),
    el("td", { class: module.cost_us ? "number late" : "number" }, module.cost_us ? showUs(module.cost_us) : "–"),
    el("td", { class: "number wide" }, module.lane_us ? showUs(module.lane_us) : "–"),
    el("td", { class: "wide paper soft" }, el("div", { class: "brief" }, module.why || "–")));
  const toggle = () => {
    const now = !unfolded.has(module.name);
    if (now) unfolded.add(module.name);
    else unfolded.delete(module.name);
    fold.setAttribute("aria-expanded", String(now));
    if (now) row.after(tensorRow(module, wanted));
    else row.nextElementSibling.remove();
  };
  fold.addEventListener("click", toggle);
  return open ? [row, tensorRow(module, wanted)] : [row];
}

function tensorRow(module, wanted) {
  const some = wanted ? module.tensors.filter((t) => tensorMatches(t, wanted)) : module.tensors;
  // those that match; all of them where only the module's name does; what is picked comes first
  const every = [...(some.length ? some : module.tensors)];
  const place = every.findIndex((t) => t.id === picked);
  if (place >= TENSORS_SHOWN) every.unshift(...every.splice(place, 1));
  const body = el("tbody", {}, ...every.slice(0, TENSORS_SHOWN).map(oneTensor));
  const table = el("table", { "aria-label": `Tensors of ${module.name}` },
    el("thead", {}, el("tr", {},
      el("th", { scope: "col" }, "Tensor"), el("th", { scope: "col" }, "Treatment, and why"),
      el("th", { scope: "col", class: "number" }, "Bytes"), el("th", { scope: "col", class: "number" }, "Costs"))),
    body);
  const over = every.length - TENSORS_SHOWN;
  const rest = () => body.append(...every.slice(TENSORS_SHOWN).map(oneTensor));
  return el("tr", { class: "inner" }, el("td", { colspan: "6" }, table, over > 0 ? moreButton(over, "more tensor", rest) : null));
}

function oneTensor(tensor) {
  const cost = tensor.waiting_us + tensor.compute_us;
  const said = [...tensor.events, ...tensor.why.map((why) => `why: ${why}`)];
  return el("tr", { "data-tensor": tensor.id, class: tensor.id === picked ? "picked" : null },
    el("td", {}, swatch(tensor.kind), " ", el("code", {}, tensor.label || tensor.id),
      el("div", { class: "soft" }, [tensor.label ? tensor.id : null, tensor.kind].filter(Boolean).join(", "))),
    el("td", {}, tensor.what, said.length ? el("ul", {}, ...said.map((line) => el("li", {}, line))) : null),
    el("td", { class: "number" }, showBytes(tensor.nbytes)),
    el("td", { class: cost ? "number late" : "number" }, cost ? showUs(cost) : "–"));
}

/** Mark the tensor's row, with its module unfolded; null: none. */
function pickTensor(tensor) {
  if (tensor === picked) return;
  picked = tensor;
  if (tensor !== null) {
    const module = app.report.modules.find((m) => m.tensors.some((t) => t.id === tensor));
    if (module) unfolded.add(module.name);
  }
  fillModules();
}

function goToTensor(tensor) {
  byId("search").value = "";
  picked = null;
  pickTensor(tensor);
  const row = document.querySelector("tr.picked");
  row?.setAttribute("tabindex", "-1");
  row?.scrollIntoView({ block: "center" });
  row?.focus({ preventScroll: true });
}
