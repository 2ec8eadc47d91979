// Why: the scores of all later tokens on the token in focus, as a curve or for all layers as a map.

const CURVE = { height: 190, left: 44, right: 10, top: 14, bottom: 24 };
const ROW = 7; // pixels of a layer in the map

// the last token that a curve shows: past the drop and its runners-up, unless all are asked for
function curveEnd(record, layer, i) {
  if (view.wide) return T - 1;
  const lasts = layersOf(layer).map((l) => {
    const runners = record.votes.runners(l, i);
    return runners.length ? runners[runners.length - 1].step : record.drop[l][i];
  }).map((step) => (step < T ? step : T - 1)).sort((a, b) => a - b);
  // of all layers: most of them
  const last = lasts[Math.floor(0.8 * (lasts.length - 1))];
  return Math.min(T - 1, i + Math.max(64, Math.round(1.25 * (last - i))));
}

function niceStep(span, most) {
  const rough = span / most, power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((n) => n * power >= rough);
}

function label(x, y, words, name = "tick", anchor = "start") {
  const text = makeSvg("text", { x, y, class: name, "text-anchor": anchor });
  text.textContent = words;
  return text;
}

// where tokens and scores are on the chart of token i
function axes(width, i, end, low, high) {
  const { height, left, right, top, bottom } = CURVE;
  return {
    width, height, left, right: width - right, top, bottom: height - bottom,
    x: (n) => left + ((width - left - right) * (n - i)) / Math.max(end - i, 1),
    y: (v) => height - bottom - ((height - bottom - top) * (v - low)) / (high - low),
    token: (px) => Math.max(i, Math.min(end, Math.round(i + ((px - left) / (width - left - right)) * (end - i)))),
  };
}

function distanceTicks(svg, { x, bottom }, i, end) {
  const step = Math.max(1, niceStep(end - i, 8));
  for (let n = step; i + n <= end; n += step) svg.append(label(x(i + n), bottom + 16, `${n}`, "tick", "middle"));
  svg.append(label(x(i), bottom + 16, "later:", "tick", "start"));
}

function drawCurve(host, record, i) {
  const { votes } = record, { layer } = view, curve = votes.curve(layer, i);
  const end = curveEnd(record, layer, i), drop = record.drop[layer][i];
  let low = votes.threshold, high = votes.threshold;
  for (let n = i + 1; n <= end; n++) [low, high] = [Math.min(low, curve[n]), Math.max(high, curve[n])];
  const room = Math.max(0.5, 0.08 * (high - low));
  const at = axes(host.clientWidth, i, end, low - room, high + room);
  const svg = makeSvg("svg", { class: "curve", width: at.width, height: at.height, role: "img", "aria-label": `Scores of the later tokens on ${shown(i)} in ${layerName(layer)}` });
  const rect = (x1, x2, y1, y2, name) => svg.append(makeSvg("rect", { x: x1, y: y1, width: Math.max(0, x2 - x1), height: Math.max(0, y2 - y1), class: name }));
  rect(at.left, at.right, at.y(votes.threshold), at.bottom, "drops");
  const free = i < votes.first ? end : Math.min(end, i + votes.recent);
  if (free > i) {
    rect(at.x(i), at.x(free + 0.5), at.top, at.bottom, "protected");
    if (at.x(free) - at.x(i) > 60) svg.append(label(at.x(i) + 5, at.top + 12, "protected"));
  }
  const step = niceStep(high - low + 2 * room, 5);
  for (let v = Math.ceil((low - room) / step) * step; v <= high + room; v += step) {
    svg.append(makeSvg("line", { x1: at.left, x2: at.right, y1: at.y(v), y2: at.y(v), class: "grid" }));
    svg.append(label(at.left - 6, at.y(v) + 4, decimal(v, step < 1 ? 1 : 0), "tick", "end"));
  }
  const line = (from, to, name) => {
    const points = [];
    for (let n = Math.max(from, i + 1); n <= Math.min(to, end); n++) points.push(`${at.x(n).toFixed(1)},${at.y(curve[n]).toFixed(1)}`);
    svg.append(makeSvg("polyline", { points: points.join(" "), class: end - i > at.width ? `${name} dense` : name }));
  };
  line(i + 1, drop, "voted");
  if (drop < end) line(drop, end, "would");
  svg.append(makeSvg("line", { x1: at.left, x2: at.right, y1: at.y(votes.threshold), y2: at.y(votes.threshold), class: "threshold" }));
  svg.append(label(at.right, Math.min(at.y(votes.threshold) + 12, at.bottom - 3), `threshold ${brief(votes.threshold)}`, "tick", "end"));
  for (const { step: runner, score } of votes.runners(layer, i)) {
    if (runner <= end) svg.append(makeSvg("circle", { cx: at.x(runner), cy: at.y(score), r: 3.5, class: "runner", "data-step": runner }));
  }
  if (drop <= end) {
    const score = votes.score[layer][i], right = at.x(drop) > at.width / 2;
    svg.append(makeSvg("line", { x1: at.x(drop), x2: at.x(drop), y1: at.top, y2: at.bottom, class: "drop-line" }));
    svg.append(makeSvg("circle", { cx: at.x(drop), cy: at.y(score), r: 4.5, class: "drop", "data-step": drop, "data-score": decimal(score) }));
    svg.append(label(at.x(drop) + (right ? -7 : 7), at.top + 12, `dropped by ${shown(drop)}, ${drop - i} later: ${decimal(score)}`, "tick strong", right ? "end" : "start"));
  }
  if (view.t > i && view.t <= end) svg.append(makeSvg("line", { x1: at.x(view.t), x2: at.x(view.t), y1: at.top, y2: at.bottom, class: "cursor" }));
  distanceTicks(svg, at, i, end);
  host.replaceChildren(svg);
  const note = (n) => (n <= i ? "" : `${shown(n)} (token ${n}, ${n - i} later): ${decimal(curve[n])}${votes.counts(n, i) ? (curve[n] <= votes.threshold ? ", votes to drop it" : ", votes to keep it") : ", its vote does not count"}`);
  follows(svg, (event) => at.token(event.offsetX), note, () => {});
}

// the note follows the pointer; a click moves the time there
function follows(element, tokenAt, note, chosen) {
  element.addEventListener("pointermove", (event) => { byId("why-note").textContent = note(tokenAt(event), event); });
  element.addEventListener("pointerleave", drawWhyNote);
  element.addEventListener("click", (event) => { chosen(event); change({ t: tokenAt(event), playing: false }); });
}

// every layer a row: warm where a token votes to drop it, cool where it votes to keep it
function drawMap(host, record, i) {
  const { votes } = record, end = curveEnd(record, ALL, i);
  const left = CURVE.left, width = host.clientWidth, room = width - left - CURVE.right;
  const canvas = make("canvas", { class: "map", role: "img", "aria-label": `Scores of the later tokens on ${shown(i)}, one row per layer` });
  const head = 5, height = head + L * ROW + 22;
  const context = fitted(canvas, width, height);
  const { accent, warm, quiet, ink, empty } = colours();
  const columns = end - i, curves = [];
  const cell = Math.max(1, room / Math.max(columns, 1));
  for (let l = 0; l < L; l++) {
    const curve = votes.curve(l, i);
    curves.push(curve);
    const drop = record.drop[l][i], y = head + l * ROW;
    context.globalAlpha = 1;
    context.fillStyle = empty;
    context.fillRect(left, y, room, ROW - 1);
    for (let n = i + 1; n <= end; n++) {
      const over = curve[n] - votes.threshold;
      context.fillStyle = over > 0 ? accent : warm;
      const strength = Math.min(1, 0.12 + Math.abs(over) / 8) * (n > drop ? 0.35 : 1) * (votes.counts(n, i) ? 1 : 0.3);
      context.globalAlpha = strength;
      context.fillRect(left + ((n - i - 1) * room) / columns, y, cell, ROW - 1);
    }
    context.globalAlpha = 1;
    if (drop <= end) {
      context.fillStyle = ink;
      context.fillRect(left + ((drop - i - 1) * room) / columns, y - 0.5, Math.max(2.5, Math.min(cell, 4)), ROW);
    }
    if (l % 5 === 0) {
      context.fillStyle = quiet;
      context.font = "11px system-ui, sans-serif";
      context.textAlign = "right";
      context.textBaseline = "middle";
      context.fillText(`${DATA.layers[l]}`, left - 6, y + ROW / 2);
    }
  }
  const step = Math.max(1, niceStep(columns, 8));
  context.fillStyle = quiet;
  context.textBaseline = "top";
  context.textAlign = "left";
  context.fillText("later:", left, head + L * ROW + 6);
  context.textAlign = "center";
  for (let n = step; n <= columns; n += step) context.fillText(`${n}`, left + ((n - 0.5) * room) / columns, head + L * ROW + 6);
  host.replaceChildren(canvas);
  const tokenAt = (event) => Math.max(i, Math.min(end, i + 1 + Math.floor(((event.offsetX - left) / room) * columns)));
  const layerAt = (event) => Math.max(0, Math.min(L - 1, Math.floor((event.offsetY - 5) / ROW)));
  const note = (n, event) => `layer ${DATA.layers[layerAt(event)]}, ${shown(n)} (token ${n}, ${n - i} later): ${decimal(curves[layerAt(event)][n] ?? NaN)}`;
  follows(canvas, tokenAt, note, (event) => change({ layer: layerAt(event) }));
}

function drawWhyNote() {
  const i = subject(), { votes } = current();
  const error = votes?.error ? `Curves are rounded (root mean square error ${decimal(votes.error.rms)}, largest ${decimal(votes.error.largest, 1)}); drops and runners-up are exact.` : "";
  byId("why-note").textContent = !votes || i < 0 ? "" : view.layer === ALL
    ? `Green votes to keep it, orange to drop it; a white or black mark is the drop, paler after it. Click a row for its curve. ${error}`
    : `Filled: the drop; circles: who would have dropped it later. ${error}`;
}

function drawWhy() {
  const body = byId("why-body"), i = subject();
  byId("why-range").hidden = i < 0 || !RECORDS.some(({ votes }) => votes?.error);
  byId("why-range").setAttribute("aria-pressed", view.wide);
  byId("why-title-note").textContent = i < 0 ? "" : `scores of the later tokens on ${shown(i)} (token ${i}), ${layerName(view.layer)}`;
  body.replaceChildren();
  for (const record of RECORDS) {
    if (COMPARES) body.append(make("h3", {}, record.name));
    const host = make("div", { class: "why-chart" });
    body.append(host);
    const missing = !record.votes ? missingVotes(record)
      : !record.votes.error ? "The scores of this text did not fit into the page; Trace.scores(token, layer) has them."
      : i < 0 ? "Select a token to see how every later token voted on it."
      : i === T - 1 ? "It is the last token: none votes on it." : "";
    if (missing) host.append(make("p", { class: "quiet" }, missing));
    else if (view.layer === ALL) drawMap(host, record, i);
    else drawCurve(host, record, i);
  }
  drawWhyNote();
}

function missingVotes(record) {
  const { method } = record.about;
  return method && method !== "pruning" ? `There are no scores: ${method} drops without votes.` : "There are no scores: this trace has no votes recorded.";
}

function listenWhy() {
  byId("why-range").addEventListener("click", () => change({ wide: !view.wide }));
}

// under a moving pointer only the token where it rests is worth drawing
let whyTimer = 0;
listeners.push((changed) => {
  const moved = changed("t") && subject() >= 0 && view.layer !== ALL;
  if (["selected", "layer", "wide"].some(changed) || moved) {
    clearTimeout(whyTimer);
    drawWhy();
  } else if (changed("subject")) {
    clearTimeout(whyTimer);
    whyTimer = setTimeout(drawWhy, 80);
  }
});
