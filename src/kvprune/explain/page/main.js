// The controls, and the initial state.

const time = byId("time"), play = byId("play");
const layerButtons = [];

function buildLayers() {
  const host = byId("layers");
  // all layers first; in the list they are last
  for (const l of [ALL, ...layersOf(ALL)]) {
    const fill = make("span", { class: "level" });
    const name = l === ALL ? "all" : `${DATA.layers[l]}`;
    const button = make("button", { type: "button", role: "radio", class: l === ALL ? "layer all" : "layer", title: layerName(l), "aria-label": layerName(l), "aria-checked": "false", tabindex: "-1" }, make("span", { class: "well" }, fill), make("span", { class: "number" }, name));
    button.addEventListener("click", () => change({ layer: l }));
    host.append(button);
    layerButtons[l] = { button, fill };
  }
  host.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    stepLayer(by);
    layerButtons[view.layer].button.focus();
  });
}

function stepLayer(by) {
  change({ layer: (view.layer + by + L + 1) % (L + 1) });
}

// the level of a layer: the share of the tokens so far that it still holds
function drawLayers() {
  let all = 0;
  for (let l = 0; l < L; l++) {
    const share = current().kept[l][view.t] / (view.t + 1);
    all += share / L;
    layerButtons[l].fill.style.height = `${100 * share}%`;
  }
  layerButtons[ALL].fill.style.height = `${100 * all}%`;
  const held = view.layer === ALL ? all * (view.t + 1) : current().kept[view.layer][view.t];
  const holds = view.layer === ALL ? `hold ${held.toFixed(1)}` : `holds ${held}`;
  byId("layer-note").textContent = `${layerName(view.layer)} ${holds} of ${view.t + 1} tokens${view.layer === ALL ? " on average" : ""}`;
}

function drawTime() {
  time.value = view.t;
  const words = `token ${view.t}, ${shown(view.t)}`;
  byId("now").textContent = words;
  time.setAttribute("aria-valuetext", words);
}

// the full text in at most 30 seconds, each token at most 160 ms
const PACE = Math.min(160, 30000 / T);
let startedAt = 0, startedFrom = 0;

function togglePlay() {
  if (view.playing) return change({ playing: false });
  const from = view.t >= T - 1 ? 0 : view.t;
  [startedAt, startedFrom] = [performance.now(), from];
  change({ playing: true, t: from });
  requestAnimationFrame(tick);
}

function tick(now) {
  if (!view.playing) return;
  const t = Math.min(T - 1, startedFrom + Math.floor(Math.max(0, now - startedAt) / PACE));
  if (t !== view.t) change({ t });
  if (t >= T - 1) change({ playing: false });
  else requestAnimationFrame(tick);
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  repaint();
}

// what is drawn on a canvas does not follow the theme by itself
function repaint() {
  palette = null;
  redrawMasks();
  drawArcs();
  drawWhy();
  drawCost();
}

function isDark() {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function listenKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const onButton = event.target.closest?.("button");
    if (event.target.closest?.("input[type=search], select")) return;
    const keys = {
      " ": onButton ? null : togglePlay,
      ",": () => change({ t: Math.max(0, view.t - 1), playing: false }),
      ".": () => change({ t: Math.min(T - 1, view.t + 1), playing: false }),
      "[": () => stepLayer(-1),
      "]": () => stepLayer(1),
      0: () => change({ layer: ALL }),
      "/": focusSearch,
      n: () => nextFound(1),
      N: () => nextFound(-1),
      m: () => enlarge(view.layer === ALL ? 0 : view.layer),
      d: () => setTheme(isDark() ? "light" : "dark"),
      "?": () => byId("help").showModal(),
      Escape: () => change({ selected: -1, focus: -1, miss: -1, back: -1 }),
    };
    const act = keys[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
}

// what sticks below the bar, and what scrolls into view, must know its height
function measureBar() {
  document.documentElement.style.setProperty("--below", `${byId("bar").offsetHeight + 14}px`);
}

function listenControls() {
  time.max = T - 1;
  time.addEventListener("input", () => change({ t: Number(time.value), playing: false }));
  play.addEventListener("click", togglePlay);
  byId("theme").addEventListener("click", () => setTheme(isDark() ? "light" : "dark"));
  byId("help-button").addEventListener("click", () => byId("help").showModal());
  byId("help-close").addEventListener("click", () => byId("help").close());
  for (const dialog of document.querySelectorAll("dialog")) {
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  }
  let resized = 0;
  window.addEventListener("resize", () => {
    cancelAnimationFrame(resized);
    resized = requestAnimationFrame(() => {
      measureBar();
      drawArcs();
      drawWhy();
      drawCost();
      drawSparsity();
      drawCache();
      moveCursors();
      panes.forEach(paintSubject);
      if (byId("large").open) drawLarge();
    });
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
}

listeners.push((changed) => {
  if (changed("t")) drawTime();
  if (["t", "layer", "side"].some(changed)) drawLayers();
  if (changed("layer")) {
    document.body.classList.toggle("all-layers", view.layer === ALL);
    layerButtons.forEach(({ button }, l) => {
      button.setAttribute("aria-checked", l === view.layer);
      button.tabIndex = l === view.layer ? 0 : -1;
    });
  }
  if (changed("playing")) {
    play.textContent = view.playing ? "❚❚" : "▶";
    play.setAttribute("aria-label", view.playing ? "Pause" : "Play");
    document.body.classList.toggle("playing", view.playing);
  }
});

function aboutLine() {
  const origin = DATA.prompt < T ? `${DATA.prompt} in the prompt, ${T - DATA.prompt} generated` : "read as one text";
  const size = `${plural(T, "token")} (${origin}) · ${plural(L, "layer")}`;
  if (COMPARES) return [`both ${sharedSettings()}`, size].join(" · ");
  const record = current(), { adapter, model } = record.about;
  const name = adapter && model && adapter !== model ? `${adapter} on ${model}` : adapter || model;
  const gone = `${percent(record.sparsityAt(ALL, T - 1))} of the earlier tokens dropped at the end, ${percent(record.sparsityOverall(ALL))} over all pairs`;
  return [name, settingsOf(record), size, gone].filter(Boolean).join(" · ");
}

byId("about").textContent = aboutLine();
panes.forEach(buildText);
buildLayers();
buildMasks();
buildCost();
buildCompare();
buildSearch();
panes.forEach(listenText);
listenDetail();
listenWhy();
listenMasks();
listenArcs();
listenControls();
listenKeys();
listenLink();
Object.assign(view, readLink(location.hash));
drawCache();
drawCost();
for (const listener of listeners) listener(() => true, view);
measureBar();
if (view.selected >= 0) reveal(view.selected);
document.documentElement.dataset.ready = "true";
