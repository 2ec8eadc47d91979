// Charts: arcs, sparsity, memory, and the statistics of the chosen layer.

const ARC_PAD = 14;
function drawArcs() {
  const canvas = byId("arcs");
  const width = canvas.parentElement.clientWidth;
  const layer = view.layer, all = layer === ALL, { drop } = current();
  // the arcs of all layers at once would be unreadable: draw only those of one token
  const free = all && subject() < 0;
  const i = !free ? subject() : view.playing ? view.t : current().busiest(view.t);
  byId("arcs-note").textContent = all
    ? `an arc from ${shown(i)} (token ${i}${free && !view.playing ? ", which dropped most" : ""}) to each token it dropped; choose a layer for all arcs`
    : "an arc from each dropper to the tokens it dropped";
  const x = (n) => ARC_PAD + ((width - 2 * ARC_PAD) * (n + 0.5)) / T;
  // the arcs that are drawn decide the height
  const spans = all
    ? layersOf(ALL).flatMap((l) => (i < 0 ? [] : [...current().droppedBy(l, i).map((j) => i - j), drop[l][i] < T ? drop[l][i] - i : 0]))
    : Array.from(drop[layer], (step, j) => (step < T ? step - j : 0));
  const widest = spans.reduce((most, span) => Math.max(most, span), 0);
  const height = Math.round(Math.min(240, Math.max(70, ((x(widest) - x(0)) / 2) + 40)));
  const context = fitted(canvas, width, height);
  const base = height - 22, most = base - 8;
  const { accent, line, quiet, warm, ink } = colours();
  const lift = (j, s) => Math.min(most, (most * (s - j)) / widest);
  const arc = (j, s) => {
    context.beginPath();
    context.moveTo(x(s), base);
    const up = base - (4 / 3) * lift(j, s);
    context.bezierCurveTo(x(s), up, x(j), up, x(j), base);
    context.stroke();
  };
  if (!all) {
    context.strokeStyle = accent;
    context.lineWidth = 1;
    context.globalAlpha = Math.max(0.12, Math.min(0.5, 80 / T)) / (i >= 0 ? 2.5 : 1);
    for (let j = 0; j < T; j++) if (drop[layer][j] <= view.t) arc(j, drop[layer][j]);
  }
  context.globalAlpha = 1;
  if (i >= 0) {
    context.lineWidth = 1.5;
    for (const l of layersOf(layer)) {
      context.globalAlpha = all ? 0.5 : 0.9;
      context.strokeStyle = accent;
      for (const j of current().droppedBy(l, i)) arc(j, i);
      context.strokeStyle = warm;
      if (drop[l][i] < T) arc(i, drop[l][i]);
    }
    context.globalAlpha = 1;
  }
  context.strokeStyle = line;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(ARC_PAD, base + 0.5);
  context.lineTo(width - ARC_PAD, base + 0.5);
  context.stroke();
  context.fillStyle = ink;
  context.fillRect(x(view.t) - 0.75, base - 4, 1.5, 9);
  context.fillStyle = quiet;
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "top";
  context.fillText("0", ARC_PAD, base + 7);
  context.textAlign = "right";
  context.fillText(`${T - 1}`, width - ARC_PAD, base + 7);
  if (i >= 0) {
    context.textAlign = x(i) < width / 4 ? "left" : x(i) > (3 * width) / 4 ? "right" : "center";
    context.fillStyle = ink;
    context.fillText(`${shown(i)} ${i}`, x(i), base + 7);
  }
}

function listenArcs() {
  const canvas = byId("arcs");
  const at = (event) => {
    const room = canvas.clientWidth - 2 * ARC_PAD;
    return Math.max(0, Math.min(T - 1, Math.floor(((event.offsetX - ARC_PAD) / room) * T)));
  };
  canvas.addEventListener("pointermove", (event) => change({ focus: at(event) }));
  canvas.addEventListener("pointerleave", () => change({ focus: -1 }));
  canvas.addEventListener("click", (event) => select(at(event)));
}

const H = 160, LEFT = 58, BOTTOM = 20, TOP = 8;

// lines over positions; rows: [{ name, className, value(k) }]
function lineChart(host, rows, highest, label, form) {
  const W = host.clientWidth || 420;
  const svg = makeSvg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": label });
  const x = (k) => LEFT + ((W - LEFT - 6) * k) / Math.max(T - 1, 1);
  const y = (v) => H - BOTTOM - ((H - BOTTOM - TOP) * v) / (highest || 1);
  for (const share of [0, 0.5, 1]) {
    const at = y(share * highest);
    svg.append(makeSvg("line", { x1: LEFT, x2: W - 6, y1: at, y2: at, class: "grid" }));
    const tick = makeSvg("text", { x: LEFT - 6, y: at + 4, class: "tick end" });
    tick.textContent = form(share * highest);
    svg.append(tick);
  }
  const last = makeSvg("text", { x: W - 6, y: H - 4, class: "tick end" });
  last.textContent = `token ${T - 1}`;
  svg.append(last);
  const stride = Math.max(1, Math.floor(T / 1000));
  for (const row of rows) {
    const points = [];
    for (let k = 0; k < T; k += stride) points.push(`${x(k).toFixed(1)},${y(row.value(k)).toFixed(1)}`);
    points.push(`${x(T - 1).toFixed(1)},${y(row.value(T - 1)).toFixed(1)}`);
    svg.append(makeSvg("polyline", { points: points.join(" "), class: row.className }));
  }
  const cursor = makeSvg("line", { y1: TOP, y2: H - BOTTOM, class: "cursor" });
  svg.append(cursor);
  host.replaceChildren(svg);
  return (t) => { cursor.setAttribute("x1", x(t)); cursor.setAttribute("x2", x(t)); };
}

let moveSparsity = () => {}, moveCache = () => {};
// the line of each record
const LINES = ["chosen", "other"];

function drawSparsity() {
  const lines = COMPARES
    ? RECORDS.map((record, side) => ({ className: LINES[side], value: (k) => record.sparsityAt(view.layer, k) }))
    : [{ className: "mean", value: (k) => current().sparsityAt(ALL, k) }];
  if (!COMPARES && view.layer !== ALL) lines.push({ className: "chosen", value: (k) => current().sparsityAt(view.layer, k) });
  moveSparsity = lineChart(byId("sparsity-chart"), lines, 1, "Share of the earlier tokens dropped, by position", percent);
}

function drawCache() {
  const most = Math.max(...RECORDS.flatMap((record) => Object.values(record.cacheBytes(T - 1))));
  moveCache = lineChart(byId("cache-chart"), [
    { className: "mean", value: (k) => RECORDS[0].cacheBytes(k).dense },
    ...RECORDS.map((record, side) => ({ className: LINES[side], value: (k) => record.cacheBytes(k).kept })),
  ], most, "Bytes of the cache over time, compared with a dense cache", bytes);
}

// with two records each note has the names in the colours of their lines
function fillNote(host, parts) {
  host.replaceChildren(...parts.flatMap(([words, name], n) => [n ? ", " : "", make("span", name ? { class: `of-${name}` } : {}, words)]));
}

function moveCursors() {
  moveSparsity(view.t);
  moveCache(view.t);
  const { layer, t } = view;
  const dense = bytes(RECORDS[0].cacheBytes(t).dense);
  if (COMPARES) {
    fillNote(byId("sparsity-note"), RECORDS.map((r, side) => [`${r.name}: ${percent(r.sparsityAt(layer, t))}`, LINES[side]]));
    fillNote(byId("cache-note"), [...RECORDS.map((r, side) => [`${r.name}: ${bytes(r.cacheBytes(t).kept)}`, LINES[side]]), [`dense: ${dense}`]]);
    return;
  }
  byId("cache-note").textContent = `${bytes(current().cacheBytes(t).kept)} of ${dense} dense at token ${t}`;
  const chosen = layer === ALL ? "" : `, ${layerName(layer)}: ${percent(current().sparsityAt(layer, t))}`;
  byId("sparsity-note").textContent = `at token ${t}, all layers: ${percent(current().sparsityAt(ALL, t))}${chosen}`;
}

// bars in HTML; rows: [{ name, share, expected? }]
function bars(host, rows, most) {
  host.replaceChildren(...rows.map((row) => {
    const fill = make("span", { class: row.stays ? "fill stays" : "fill" });
    fill.style.width = `${(100 * row.share) / most}%`;
    const track = make("span", { class: "track" }, fill);
    if (row.expected !== undefined) {
      const tick = make("span", { class: "expected" });
      tick.style.left = `${(100 * row.expected) / most}%`;
      track.append(tick);
    }
    return make("div", { class: "row", "data-name": row.name, "data-share": row.share }, make("span", { class: "name" }, row.name), track, make("span", { class: "value" }, percent(row.share)));
  }));
}

function drawStatistics() {
  const kinds = droppersByKind(current(), view.layer);
  bars(byId("kind-chart"), kinds, Math.max(0.01, ...kinds.map((row) => Math.max(row.share, row.expected))));
  const top = byId("top-droppers");
  const rows = topDroppers(current(), view.layer, 8);
  top.replaceChildren(make("p", { class: "quiet" }, rows.length ? "Most frequent: " : "Nothing was dropped."));
  for (const { token, share } of rows) {
    const seen = token === "" ? "part of a character" : token.trim() === "" ? token.replace(/\n/g, "↵").replace(/ /g, "␣") : token.trim();
    top.firstChild.append(make("span", { class: "one-line" }, make("code", {}, seen), ` ${percent(share)}`), " ");
  }
  bars(byId("speech-chart"), keptByPart(current(), view.layer), 1);
  const lives = lifetimes(current(), view.layer);
  bars(byId("life-chart"), lives, Math.max(...lives.map((row) => row.share)));
  byId("life-rule").textContent = lifeRule();
}

// what the settings do not allow shapes the lifetimes
function lifeRule() {
  const recent = current().setting("protect_recent"), first = current().setting("protect_first");
  const { chance, share } = atFirstChance(current(), view.layer);
  const rules = [];
  if (recent) rules.push(`protect_recent ${recent}: nothing can be dropped before distance ${chance}; ${percent(share)} of the drops come at ${chance}, the first allowed.`);
  if (first) rules.push(`protect_first ${first}: the first ${first === 1 ? "token stays" : `${first} tokens stay`}.`);
  return rules.join(" ");
}

listeners.push((changed) => {
  if (changed("layer") || changed("side")) { drawSparsity(); drawStatistics(); }
  if (["layer", "t", "side"].some(changed)) moveCursors();
  if (["layer", "t", "subject", "side", "playing"].some(changed)) drawArcs();
});
