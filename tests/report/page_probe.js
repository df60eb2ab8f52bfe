// What a person would do with the page, and what came of it; appended to a copy of it by tests.

const found = {};
const settle = () => new Promise((done) => setTimeout(done, 60));
const press = (key) => byId("lanes").dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
const shown = () => [app.from, app.to];
const moduleNames = () => [...document.querySelectorAll("#modules > tbody > tr > td:first-child > .fold")].map((b) => b.textContent);
const search = (text) => {
  byId("search").value = text;
  byId("search").dispatchEvent(new Event("input"));
};

function inks(canvas) {
  const { data: pixels } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return new Set(new Uint32Array(pixels.buffer)).size;
}

function luminance(text) {
  const parts = text.match(/[\d.]+/g).map(Number);
  const [r, g, b] = parts.slice(0, 3).map((v) => (v <= 10.3 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4));
  return { light: 0.2126 * r + 0.7152 * g + 0.0722 * b, clear: parts[3] === 0 };
}

/** Words that are hard to read: below 4.5 to 1 on what lies behind them. */
function faint() {
  const poor = new Set();
  for (const element of document.querySelectorAll("body *")) {
    const words = [...element.childNodes].some((n) => n.nodeType === Node.TEXT_NODE && n.data.trim());
    if (!words || !element.checkVisibility() || element.matches("script, :disabled")) continue;
    let behind = element;
    while (luminance(getComputedStyle(behind).backgroundColor).clear) behind = behind.parentElement;
    const [a, b] = [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor].map((c) => luminance(c).light);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.add(`${element.tagName}.${element.className} ${ratio.toFixed(2)}`);
  }
  return [...poor];
}

const nameless = () =>
  [...document.querySelectorAll("button, input, select")]
    .filter((e) => !(e.textContent.trim() || e.ariaLabel || e.labels?.length))
    .map((e) => e.outerHTML);

async function probe() {
  await settle();
  found.name = byId("name").textContent;
  found.title = document.title;
  found.cards = [...document.querySelectorAll("#cards > div")].map((card) => card.textContent);
  found.inks = [inks(byId("memory")), inks(byId("lanes"))];
  found.moment = byId("moment").textContent;
  const long = document.createTextNode("_scaled_dot_product_flash_attention".repeat(4));
  byId("moment").append(long);  // an op's name, on a narrow window
  found.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  long.remove();
  found.figures = FIGURES.map((value) => [showUs(value), showBytes(Math.round(value))]);

  byId("lanes").focus();
  const whole = shown();
  press("+");
  const nearer = shown();
  press("ArrowRight");
  const later = shown();
  press("0");
  found.zoom = { whole, nearer, later, again: shown() };
  press("n");
  found.wait = byId("chosen").textContent;
  byId("next-wait").click();
  found.next = byId("chosen").textContent;
  press("Escape");

  press(".");
  press("ArrowDown");
  press("ArrowDown");
  await settle();
  found.stepped = byId("chosen").textContent;
  showWhole();
  await settle();
  const canvas = byId("lanes"), box = canvas.getBoundingClientRect();
  const row = barRows().find((r) => r.lane === 1 && r.by === "planned");
  const middle = (row.rows.starts[0] + row.rows.ends[0]) / 2;
  const at = {
    pointerId: 1, bubbles: true, clientY: box.top + row.top + row.height / 2,
    clientX: box.left + ((middle - app.from) / (app.to - app.from)) * box.width,
  };
  canvas.dispatchEvent(new PointerEvent("pointermove", at));
  found.tip = byId("tip").hidden ? "" : byId("tip").textContent;
  choose(hit(canvas, at));
  found.picked = [...document.querySelectorAll("tr.picked")].map((r) => r.dataset.tensor);
  document.querySelector("#chosen button").click();
  found.focused = document.activeElement.dataset.tensor;
  const before = shown();
  canvas.dispatchEvent(new WheelEvent("wheel", { ...at, deltaY: -100, ctrlKey: true, cancelable: true }));
  found.wheeled = shown()[1] - shown()[0] < before[1] - before[0];

  found.modules = moduleNames();
  document.querySelector('[data-sort="name"]').click();
  found.byName = moduleNames();
  document.querySelector('[data-sort="name"]').click();
  found.byNameBack = moduleNames();
  found.sorted = [...document.querySelectorAll("#modules [aria-sort]")].map((th) => th.ariaSort);
  search("nothing is called so");
  found.none = moduleNames();
  search("SCRIPT");
  found.searched = moduleNames();
  const fold = document.querySelector("#modules .fold");
  if (fold.ariaExpanded === "true") fold.click();
  fold.click();
  found.unfolded = [fold.ariaExpanded, document.querySelectorAll("#modules [data-tensor]").length];
  search("");

  found.tiers = [...byId("tiers").children].map((b) => b.textContent);
  byId("tiers").children[1].click();
  await settle();
  found.hostMoment = byId("moment").textContent;

  found.faint = faint();
  found.theme = [document.documentElement.dataset.theme];
  byId("theme").click();
  await settle();
  found.theme.push(document.documentElement.dataset.theme);
  found.faint.push(...faint());
  found.nameless = nameless();
  window.dispatchEvent(new Event("beforeprint"));
  found.paper = [byId("memory").width, byId("lanes").width, document.documentElement.dataset.theme];
  window.dispatchEvent(new Event("afterprint"));
  found.after = document.documentElement.dataset.theme;

  byId("graphs").value = "1";
  byId("graphs").dispatchEvent(new Event("change"));
  await settle();
  found.second = [byId("name").textContent, byId("verdict").textContent];
  found.unchanged = [byId("split").checkVisibility(), byId("ways").checkVisibility()].map((v) => !v);

  byId("graphs").value = "2";
  byId("graphs").dispatchEvent(new Event("change"));
  await settle();
  const cellsOf = (id) => [...document.querySelectorAll(`#${id} tbody tr`)].map((row) => [...row.cells].map((c) => c.textContent));
  found.changed = [byId("split").checkVisibility(), byId("ways").checkVisibility()];
  found.parts = [...byId("parts").children].map((part) => part.textContent);
  found.beforeAfter = cellsOf("before-after");
  found.ways = cellsOf("simple-ways");
  found.changesOverflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  found.faint.push(...faint());
  found.intruders = window.intruders ?? 0;
}

probe()
  .catch((error) => found.thrown = String(error?.stack ?? error))
  .finally(() => document.body.append(el("pre", { id: "probed" }, JSON.stringify({ ...found, wrong }))));
