// The page as a whole: which graph, which theme, on screen or on paper.

const data = JSON.parse(byId("data").textContent);

function showReport(i) {
  app.report = data.reports[i];
  app.tier = 0;
  app.hover = null;
  const slower = (app.report.measured_ns ?? 0) / app.report.step_ns;
  app.stretch = slower > LINED_UP ? slower : 1;
  app.from = 0;
  app.to = endOf(app.report);
  unfolded.clear();
  byId("search").value = "";
  byId("name").textContent = app.report.name;
  byId("verdict").textContent = app.report.verdict;
  const cards = byId("cards"), n = app.report.cards.length;
  cards.style.setProperty("--in-a-row", n > 7 ? Math.ceil(n / 2) : n);
  cards.style.setProperty("--in-two-rows", Math.ceil(n / 2));
  cards.replaceChildren(
    ...app.report.cards.map(({ title, value, note }) =>
      el("div", {}, el("dt", {}, title), el("dd", { class: "value" }, value), el("dd", { class: "note" }, note))));
  fillLanes();
  if (app.report.memory.length) fillTiers();
  fillWaits();
  fillCertificate();
  fillChanges();
  fillModules();
  choose(null);
}

// --- theme -------------------------------------------------------------------------------------

const dark = window.matchMedia("(prefers-color-scheme: dark)");

function themed(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = theme === "dark" ? "Light" : "Dark";
  byId("theme").setAttribute("aria-label", `Switch to ${theme === "dark" ? "light" : "dark"}`);
  colours.clear();
  if (app.report) redraw();
}

byId("theme").addEventListener("click", () => themed(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
dark.addEventListener("change", () => themed(dark.matches ? "dark" : "light"));
const asked = /theme=(dark|light)/.exec(location.hash)?.[1];
themed(asked ?? (dark.matches ? "dark" : "light"));

// --- paper: light, the whole step, at a width of its own ---------------------------------------

let onScreen = null;

function toPaper() {
  if (app.printing) return;
  onScreen = { from: app.from, to: app.to, theme: document.documentElement.dataset.theme };
  document.documentElement.dataset.theme = "light";
  colours.clear();
  Object.assign(app, { printing: true, from: 0, to: endOf(app.report), hover: null });
  drawAll();
}

function toScreen() {
  if (!app.printing) return;
  Object.assign(app, { printing: false, from: onScreen.from, to: onScreen.to });
  themed(onScreen.theme);
}

window.addEventListener("beforeprint", toPaper);
window.addEventListener("afterprint", toScreen);

// --- controls ----------------------------------------------------------------------------------

byId("zoom-in").addEventListener("click", () => zoom(1 / 1.6));
byId("zoom-out").addEventListener("click", () => zoom(1.6));
byId("whole").addEventListener("click", showWhole);
byId("line-up").addEventListener("click", () => {
  app.stretch = app.stretch === 1 ? app.report.measured_ns / app.report.step_ns : 1;
  fillLanes();
  choose(null);
  showWhole();
});
byId("next-wait").addEventListener("click", () => nextWait(1));
byId("search").addEventListener("input", fillModules);

steer(byId("memory"));
const lanes = byId("lanes"), tip = byId("tip");
steer(lanes, {
  over(event) {
    const found = event && hit(lanes, event);
    tip.hidden = !found;
    if (!found) return;
    const [title, ...rest] = about(found);
    tip.replaceChildren(el("b", {}, title), ...rest.map((said) => el("div", {}, said)));
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(event.clientX + 14, innerWidth - box.width - 8))}px`;
    tip.style.top = `${event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 18}px`;
  },
  pressed(event) {
    lanes.focus();
    choose(hit(lanes, event));
  },
});
lanes.addEventListener("dblclick", (event) => {
  const found = hit(lanes, event);
  if (found) show(found.start - (found.end - found.start), found.end + (found.end - found.start));
});
new ResizeObserver(() => app.report && redraw()).observe(byId("main"));

byId("pick").hidden = data.reports.length < 2;
byId("graphs").append(...data.reports.map((report, i) => el("option", { value: i }, report.name)));
byId("graphs").addEventListener("change", () => showReport(Number(byId("graphs").value)));
showReport(0);
