// Memory: bytes held against dense, over time; which layer holds which token; the layers.

const layerButtons = [];

function buildLayers(L) {
  const row = byId("layers");
  row.replaceChildren();
  layerButtons.length = 0;
  for (let l = ALL; l < L; l++) {
    const level = make("span", { class: "level" });
    const button = makeButton("", () => change({ layer: l }), { role: "radio", class: l === ALL ? "layer all" : "layer", title: layerName(l), "aria-label": layerName(l) });
    button.append(make("span", { class: "well" }, level), make("span", { class: "number" }, l === ALL ? "all" : l));
    row.append(button);
    layerButtons.push({ button, level });
  }
}

function drawLayers() {
  const record = current(), L = record?.layers ?? 0;
  if (layerButtons.length !== L + 1) buildLayers(L);
  if (L === 0) return;
  const t = Math.min(view.t, record.last), held = record.held(t), read = record.readAt(t);
  const mean = held.reduce((a, b) => a + b, 0) / L;
  layerButtons.forEach(({ button, level }, n) => {
    const share = (n ? held[n - 1] : mean) / Math.max(1, read);
    level.style.height = `${Math.min(100, 100 * share)}%`;
    button.setAttribute("aria-checked", n - 1 === view.layer);
    button.tabIndex = n - 1 === view.layer ? 0 : -1;
  });
  byId("layer-note").textContent = view.layer === ALL
    ? `all layers hold ${mean.toFixed(1)} of ${count(read)} tokens on average`
    : `layer ${view.layer} holds ${count(held[view.layer])} of ${count(read)} tokens`;
}

function stepLayer(by) {
  const L = current()?.layers ?? 0;
  change({ layer: ((view.layer + 1 + by + L + 1) % (L + 1)) - 1 });
}

function drawTime() {
  const record = current(), slider = byId("time");
  const t = Math.min(view.t, record.last);
  slider.max = record.last;
  slider.value = t;
  const words = record.tokens[t] ? `token ${t}, ${quoted(record.tokens[t].text)}` : "";
  byId("now").textContent = words;
  slider.setAttribute("aria-valuetext", words);
  byId("live").setAttribute("aria-pressed", view.t === Infinity);
}

// one row per number: its name, a bar on a common scale, its value
function barRow(name, value, most, words, className = "") {
  const fill = make("span", { class: `fill ${className}` });
  fill.style.width = `${(100 * value) / (most || 1)}%`;
  return make("div", { class: "row", "data-name": name, "data-value": value }, make("span", { class: "name" }, name), make("span", { class: "track" }, fill), make("span", { class: "value" }, words));
}

function drawBytes() {
  const record = current(), now = record.bytesAt(Math.min(view.t, record.last));
  byId("memory").hidden = !now;
  if (!now) return;
  const sign = now.about ? "≈ " : "";
  byId("memory-bars").replaceChildren(barRow("held", now.held, now.dense, sign + bytes(now.held)), barRow("dense", now.dense, now.dense, sign + bytes(now.dense), "stays"));
  byId("memory-note").textContent = `${percent(now.held / (now.dense || 1))} of a dense cache`;
  drawChart(record);
}

const CHART = { height: 92, bottom: 16, top: 6 };
function drawChart(record) {
  const place = byId("memory-chart"), W = place.clientWidth || 300, { height: H, bottom, top } = CHART;
  const { samples } = record, last = Math.max(1, samples.at(-1).step), most = Math.max(...samples.map(({ held, dense }) => Math.max(held, dense)), 1);
  const x = (step) => ((W - 2) * step) / last + 1, y = (value) => H - bottom - ((H - bottom - top) * value) / most;
  const svg = makeSvg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `Bytes held and bytes of a dense cache over ${last} tokens` });
  svg.append(makeSvg("line", { x1: 0, x2: W, y1: y(0), y2: y(0), class: "grid" }));
  const stride = Math.max(1, Math.floor(samples.length / 400));
  const shown = samples.filter((_, n) => n % stride === 0 || n === samples.length - 1);
  const points = (name) => [`${x(0)},${y(0)}`, ...shown.map((sample) => `${x(sample.step).toFixed(1)},${y(sample[name]).toFixed(1)}`)].join(" ");
  svg.append(makeSvg("polygon", { points: `${points("held")} ${x(last)},${y(0)}`, class: "area" }));
  svg.append(makeSvg("polyline", { points: points("dense"), class: "mean" }), makeSvg("polyline", { points: points("held"), class: "chosen" }));
  if (view.t !== Infinity) svg.append(makeSvg("line", { x1: x(view.t + 1), x2: x(view.t + 1), y1: top, y2: H - bottom, class: "cursor" }));
  const label = (words, at, anchor) => {
    const text = makeSvg("text", { x: at, y: H - 3, class: `tick ${anchor}` });
    text.textContent = words;
    svg.append(text);
  };
  label("0", 1, "");
  label(`${count(last)} tokens read`, W - 1, "end");
  place.replaceChildren(svg);
}

// layers × tokens, a pixel each, scaled to the panel
const small = document.createElement("canvas");
function drawMap() {
  const record = current(), canvas = byId("map"), { layers: L } = record, T = record.tokens.length;
  if (!L || !T || byId("memory").hidden) return;
  const t = Math.min(view.t, record.last), width = canvas.clientWidth || 300, height = Math.min(110, Math.max(30, 3 * L));
  [small.width, small.height] = [T, L];
  const picture = small.getContext("2d").createImageData(T, L), { data } = picture;
  const parse = (colour) => [1, 3, 5].map((n) => parseInt(colour.slice(n, n + 2), 16));
  const { accent, empty } = colours(), [on, off] = [parse(accent), parse(empty)];
  for (let l = 0; l < L; l++) {
    const drop = record.drop[l], alpha = view.layer === ALL || view.layer === l ? 255 : 90;
    for (let i = 0; i < T; i++) {
      const at = 4 * (l * T + i), future = i > t, colour = !future && !(drop[i] <= t) ? on : off;
      [data[at], data[at + 1], data[at + 2]] = colour;
      data[at + 3] = future ? 60 : colour === on ? alpha : 255;
    }
  }
  small.getContext("2d").putImageData(picture, 0, 0);
  const context = fitted(canvas, width, height);
  context.imageSmoothingEnabled = T > width;
  context.drawImage(small, 0, 0, width, height);
}

function listenMap() {
  const canvas = byId("map");
  const at = (event) => [Math.floor((event.offsetX / canvas.clientWidth) * current().tokens.length), Math.floor((event.offsetY / canvas.clientHeight) * current().layers)];
  canvas.addEventListener("pointermove", (event) => { if (current()) change({ subject: [0, Math.max(0, Math.min(current().last, at(event)[0]))] }); });
  canvas.addEventListener("click", (event) => {
    const layer = at(event)[1];
    change({ layer: layer === view.layer ? ALL : Math.max(0, Math.min(current().layers - 1, layer)) });
  });
}

function drawMemory() {
  const record = current(), any = Boolean(record?.tokens.length);
  byId("bar").hidden = !any;
  if (!any) {
    byId("memory").hidden = true;
    return;
  }
  drawTime();
  drawLayers();
  drawBytes();
  drawMap();
}

// the whole text in at most 30 seconds, each token at most 120 ms
let startedAt = 0, startedFrom = 0;
function togglePlay() {
  const record = current();
  if (!record) return;
  if (view.playing) return change({ playing: false });
  startedFrom = view.t >= record.last ? 0 : view.t;
  startedAt = performance.now();
  change({ playing: true, t: startedFrom });
  requestAnimationFrame(tick);
}

function tick(now) {
  if (!view.playing || !current()) return;
  const { last } = current(), pace = Math.min(120, 30000 / (last + 1));
  const t = startedFrom + Math.floor(Math.max(0, now - startedAt) / pace);
  if (t >= last) return change({ t: Infinity, playing: false });
  if (t !== view.t) change({ t });
  requestAnimationFrame(tick);
}

function moveTime(by) {
  if (!current()) return;
  const { last } = current(), t = Math.max(0, Math.min(view.t, last) + by);
  change({ t: t >= last ? Infinity : t, playing: false });
}

function listenTime() {
  byId("time").addEventListener("input", (event) => {
    const t = Number(event.target.value);
    change({ t: t >= current().last ? Infinity : t, playing: false });
  });
  byId("play").addEventListener("click", togglePlay);
  byId("live").addEventListener("click", () => change({ t: Infinity, playing: false }));
  byId("layers").addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    stepLayer(by);
    layerButtons[view.layer + 1].button.focus();
  });
}

listeners.push((changed) => {
  if (changed("news", "t", "layer")) drawMemory();
  if (changed("playing")) {
    byId("play").textContent = view.playing ? "❚❚" : "▶";
    byId("play").setAttribute("aria-label", view.playing ? "Pause" : "Play");
  }
});
