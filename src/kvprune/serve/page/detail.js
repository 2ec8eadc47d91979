// The token in focus: who dropped it in which layers, what it dropped itself.

let marked = [];
const threads = makeSvg("svg", { class: "threads", "aria-hidden": "true" });

function mark(record, i, name) {
  const span = drawingOf(record).spans[i];
  if (!span) return;
  span.classList.add(name);
  marked.push([span, name]);
}

function droppersIn(record, i) {
  const t = Math.min(view.t, record.last);
  return record.droppersOf(i, t).filter(([, layers]) => view.layer === ALL || layers.includes(view.layer));
}

function drawSubject() {
  for (const [span, name] of marked) span.classList.remove(name);
  marked = [];
  threads.remove();
  if (!view.subject) return;
  const [side, i] = view.subject, record = stage.records[side];
  if (!record?.tokens[i]) return;
  const droppers = droppersIn(record, i).map(([dropper]) => dropper), dropped = record.droppedBy(i, view.layer);
  for (const j of dropped) mark(record, j, "dropped");
  for (const j of droppers) mark(record, j, "dropper");
  mark(record, i, "focus");
  drawThreads(record, i, { "to-dropped": dropped, "to-dropper": droppers });
}

const MOST_THREADS = 120;
function drawThreads(record, i, groups) {
  const { spans } = drawingOf(record), box = host.getBoundingClientRect();
  if (!spans[i]) return;
  const middle = (n) => {
    const place = spans[n].getClientRects()[0] || spans[n].getBoundingClientRect();
    return [place.left - box.left + place.width / 2, place.top - box.top + place.height / 2];
  };
  const [x, y] = middle(i), paths = [];
  for (const [name, tokens] of Object.entries(groups)) {
    for (const n of tokens.filter((n) => spans[n]).slice(-MOST_THREADS)) {
      const [u, v] = middle(n), lift = Math.min(60, 14 + Math.hypot(x - u, y - v) / 5);
      paths.push(makeSvg("path", { d: `M${x},${y} C${x},${y - lift} ${u},${v - lift} ${u},${v}`, class: name }));
    }
  }
  threads.setAttribute("width", box.width);
  threads.setAttribute("height", host.scrollHeight);
  threads.replaceChildren(...paths);
  host.append(threads);
}

// one bar per layer: from where the token is read to where it is dropped
function lifeBars(record, i) {
  const T = record.tokens.length, L = record.layers;
  const svg = makeSvg("svg", { class: "life", viewBox: `0 0 ${T} ${L * 4}`, preserveAspectRatio: "none", role: "img", "aria-label": "Its lifetime in each layer" });
  for (let l = 0; l < L; l++) {
    const end = Math.min(record.drop[l][i] ?? T, T), held = record.drop[l][i] === undefined;
    svg.append(makeSvg("rect", { x: 0, y: l * 4 + 0.5, width: T, height: 3, class: "room" }));
    svg.append(makeSvg("rect", { x: i, y: l * 4 + 0.5, width: Math.max(end - i, T / 200), height: 3, class: held ? "lives" : "lived" }));
  }
  if (view.t !== Infinity) svg.append(makeSvg("line", { x1: view.t + 0.5, x2: view.t + 0.5, y1: 0, y2: L * 4, class: "cursor" }));
  return svg;
}

function tokenButton(record, side, i) {
  return makeButton(quoted(record.tokens[i].text), () => {
    change({ subject: [side, i] });
    drawingOf(record).spans[i]?.scrollIntoView({ block: "center" });
  }, { class: "token" });
}

function droppersList(record, side, i) {
  const list = make("ul", { class: "droppers" }), most = 6, found = droppersIn(record, i);
  for (const [dropper, layers] of found.slice(0, most)) {
    const item = make("li", {});
    if (dropper >= 0) item.append(tokenButton(record, side, dropper), ` ${plural(dropper - i, "token")} later, in `);
    else item.append("the cache's own rule, in ");
    item.append(layers.length === record.layers ? "every layer" : `${layers.length === 1 ? "layer" : "layers"} ${ranges(layers)}`);
    list.append(item);
  }
  if (found.length > most) list.append(make("li", {}, `and ${plural(found.length - most, "other token")}`));
  return list;
}

function drawDetail() {
  const body = byId("detail-body"), found = view.subject && stage.records[view.subject[0]]?.tokens[view.subject[1]];
  byId("detail").classList.toggle("empty", !found);
  if (!found) {
    body.replaceChildren(make("p", { class: "quiet" }, current() ? "Point at a token, or reach it by tab and arrow keys, to see who dropped it and in which layers." : "Nothing to show yet."));
    return;
  }
  const [side, i] = view.subject, record = stage.records[side], L = record.layers;
  const t = Math.min(view.t, record.last), held = Math.round(record.share(i, t, ALL) * L);
  const origin = i < record.prompt ? "prompt" : "answer";
  const parts = [make("p", { class: "big", dir: "auto" }, quoted(found.text)), make("p", { class: "quiet" }, `token ${i}, ${origin}${side ? ", nothing dropped" : ""}`)];
  if (L) {
    const holds = i > t ? "Not read yet." : held === L ? "Every layer holds it." : held === 0 ? "No layer holds it any more." : `${held} of ${L} layers hold it.`;
    parts.push(make("p", { class: "holds" }, holds));
    if (i <= t && held < L) {
      const list = droppersList(record, side, i);
      parts.push(list.childElementCount ? make("p", {}, "Dropped by") : make("p", {}, `${layerName(view.layer)} holds it.`), list);
    }
    parts.push(lifeBars(record, i));
    const dropped = record.droppedBy(i, view.layer).filter(() => i <= t), most = 24;
    if (dropped.length) {
      const list = make("p", { class: "dropped-list" }, `It dropped ${plural(dropped.length, "token")}: `);
      for (const j of dropped.slice(0, most)) list.append(tokenButton(record, side, j), " ");
      if (dropped.length > most) list.append(`and ${dropped.length - most} more`);
      parts.push(list);
    }
  }
  body.replaceChildren(...parts);
}

// the token above or below: the nearest in x on the adjacent line
function vertical(tokens, n, down) {
  const here = tokens[n].getBoundingClientRect();
  let best = n, top = null, distance = Infinity;
  for (let m = n + (down ? 1 : -1); m >= 0 && m < tokens.length; m += down ? 1 : -1) {
    const box = tokens[m].getBoundingClientRect();
    if (Math.abs(box.top - here.top) < 4 || box.width === 0) continue;
    if (top === null) top = box.top;
    if (Math.abs(box.top - top) > 4) break;
    if (Math.abs(box.left - here.left) < distance) [best, distance] = [m, Math.abs(box.left - here.left)];
  }
  return best;
}

function listenTokens() {
  const subjectOf = (event) => {
    const span = event.target.closest?.(".t[data-i]");
    return span ? [Number(span.dataset.side), Number(span.dataset.i)] : null;
  };
  const same = (a, b) => a && b && a[0] === b[0] && a[1] === b[1];
  const point = (event) => {
    const subject = subjectOf(event);
    if (subject && !same(subject, view.subject)) change({ subject });
  };
  host.addEventListener("pointerover", (event) => { if (event.pointerType !== "touch") point(event); });
  host.addEventListener("click", point);
  host.addEventListener("focusin", point);
  host.addEventListener("keydown", (event) => {
    if (!event.target.matches(".t[data-i]")) return;
    const tokens = [...event.target.closest(".text, .template").querySelectorAll(".t")], n = tokens.indexOf(event.target);
    const to = { ArrowRight: () => n + 1, ArrowLeft: () => n - 1, ArrowDown: () => vertical(tokens, n, true), ArrowUp: () => vertical(tokens, n, false), Home: () => 0, End: () => tokens.length - 1 }[event.key]?.();
    if (to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    const next = tokens[Math.max(0, Math.min(tokens.length - 1, to))];
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
  byId("detail-close").addEventListener("click", () => change({ subject: null }));
}

// what a new step may change of the panel
let told = "";
listeners.push((changed) => {
  const [side, i] = view.subject ?? [0, -1], record = stage.records[side];
  const now = [Boolean(record), record?.gone[i] ?? 0].join();
  if (changed("subject", "layer", "t") || (changed("news") && now !== told)) {
    drawSubject();
    drawDetail();
  }
  told = now;
});
