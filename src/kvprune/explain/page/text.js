// The text: one span per token, styled by the time; the token in focus and its threads.

const text = byId("text");
const spans = [];

function buildText() {
  const fragment = document.createDocumentFragment();
  for (let i = 0; i < T; i++) {
    const token = DATA.tokens[i];
    const span = make("span", { class: "t", role: "option", tabindex: "-1", "data-i": i }, token);
    if (token === "") span.classList.add("part");
    else if (token.includes("\n")) span.classList.add("break");
    if (i === DATA.prompt) span.classList.add("first-written");
    spans.push(span);
    fragment.append(span);
  }
  text.append(fragment);
  spans[0].tabIndex = 0;
}

// the style of a token at time t: kept or dropped in one layer, shaded by the share of all layers
function paint(i) {
  const span = spans[i], { t, layer } = view;
  const list = span.classList;
  list.toggle("future", i > t);
  list.toggle("now", i === t);
  if (layer === ALL) {
    const alive = aliveLayers(i, t) / L;
    list.toggle("gone", i <= t && alive === 0);
    list.toggle("held", i <= t && alive > 0);
    span.style.setProperty("--alive", alive.toFixed(2));
  } else {
    const gone = DROP[layer][i] <= t;
    list.toggle("gone", i <= t && gone);
    list.toggle("held", i <= t && !gone);
    span.style.setProperty("--alive", gone ? 0 : 1);
  }
}

function paintTime(before) {
  const low = Math.min(before, view.t), high = Math.max(before, view.t);
  for (let i = low; i <= high; i++) paint(i);
  for (const l of layersOf(view.layer)) {
    const { from, dropped } = EVENTS[l];
    for (let n = from[low]; n < from[high + 1]; n++) paint(dropped[n]);
  }
}

// while playing, keep the current token in view
function follow() {
  const top = spans[view.t].offsetTop - text.offsetTop;
  if (top < text.scrollTop || top > text.scrollTop + text.clientHeight - 48) text.scrollTop = top - 60;
}

let marked = [];
function mark(i, name) {
  spans[i].classList.add(name);
  marked.push([i, name]);
}

// the dropper and the dropped of the token in focus, by layer
function relations(i) {
  const droppers = new Map(), dropped = new Map();
  const add = (map, token, layer) => map.set(token, [...(map.get(token) || []), layer]);
  for (const l of layersOf(view.layer)) {
    if (DROP[l][i] < T) add(droppers, DROP[l][i], l);
    for (const j of droppedBy(l, i)) add(dropped, j, l);
  }
  return { droppers, dropped };
}

function paintSubject() {
  for (const [i, name] of marked) spans[i].classList.remove(name);
  marked = [];
  const i = subject();
  if (view.selected >= 0) mark(view.selected, "selected");
  if (i >= 0) {
    const { droppers, dropped } = relations(i);
    mark(i, "focus");
    for (const j of dropped.keys()) mark(j, "dropped");
    for (const j of droppers.keys()) mark(j, "dropper");
    drawThreads(i, droppers, dropped);
  } else byId("threads").replaceChildren();
  text.querySelector("[aria-selected]")?.removeAttribute("aria-selected");
  spans[view.selected]?.setAttribute("aria-selected", "true");
}

const MOST_THREADS = 120;
function drawThreads(i, droppers, dropped) {
  const svg = byId("threads");
  const frame = byId("text-frame").getBoundingClientRect();
  svg.setAttribute("width", frame.width);
  svg.setAttribute("height", frame.height);
  const middle = (n) => {
    const box = spans[n].getClientRects()[0] || spans[n].getBoundingClientRect();
    return [box.left - frame.left + box.width / 2, box.top - frame.top + box.height / 2];
  };
  const [x, y] = middle(i);
  const paths = [];
  const thread = (n, name) => {
    const [u, v] = middle(n);
    const lift = Math.min(60, 14 + Math.hypot(x - u, y - v) / 5);
    const d = `M${x},${y} C${x},${y - lift} ${u},${v - lift} ${u},${v}`;
    paths.push(makeSvg("path", { d, class: name }));
  };
  for (const n of [...dropped.keys()].slice(-MOST_THREADS)) thread(n, "to-dropped");
  for (const n of droppers.keys()) thread(n, "to-dropper");
  svg.replaceChildren(...paths);
}

function tokenButton(i) {
  const button = make("button", { type: "button", class: "token", "data-i": i }, shown(i));
  button.addEventListener("click", () => select(i));
  return button;
}

function select(i) {
  change({ selected: i, focus: i });
  if (i >= 0) spans[i].scrollIntoView({ block: "nearest" });
}

// one bar per layer: from where the token is read to where it is dropped
function lifeBars(i) {
  const svg = makeSvg("svg", { class: "life", viewBox: `0 0 ${T} ${L * 4}`, preserveAspectRatio: "none", role: "img", "aria-label": "Its lifetime in each layer" });
  for (let l = 0; l < L; l++) {
    const end = Math.min(DROP[l][i], T);
    svg.append(makeSvg("rect", { x: 0, y: l * 4 + 0.5, width: T, height: 3, class: "room" }));
    svg.append(makeSvg("rect", { x: i, y: l * 4 + 0.5, width: Math.max(end - i, T / 200), height: 3, class: DROP[l][i] < T ? "lived" : "lives" }));
  }
  svg.append(makeSvg("line", { x1: view.t + 0.5, x2: view.t + 0.5, y1: 0, y2: L * 4, class: "cursor" }));
  return svg;
}

function drawDetail() {
  const body = byId("detail-body"), i = subject();
  byId("detail").classList.toggle("empty", i < 0);
  if (i < 0) {
    body.replaceChildren(make("p", { class: "quiet" }, "Point at a token, or move with the arrow keys, to see when it was dropped, by which token, and which layers keep it. Click or press enter to select it."));
    return;
  }
  const parts = [make("p", { class: "big", dir: "auto" }, shown(i))];
  const origin = i >= DATA.prompt ? "generated" : "prompt";
  const labels = new Set([DATA.kinds[DATA.kind[i]], DATA.speeches[DATA.speech[i]]]);
  labels.delete(undefined);
  parts.push(make("p", { class: "quiet" }, [`token ${i}`, origin, ...labels].join(", ")));
  const { dropped } = relations(i);
  if (view.layer !== ALL) {
    const step = DROP[view.layer][i];
    const fate = make("p", { id: "fate" });
    if (step < T) {
      const later = step - i === 1 ? "the next token" : `${step - i} tokens later`;
      fate.append(`Dropped in ${layerName(view.layer)} by `, tokenButton(step), ` (token ${step}, ${later}).`);
    } else fate.append(`${layerName(view.layer)[0].toUpperCase()}${layerName(view.layer).slice(1)} keeps it to the end.`);
    parts.push(fate);
  }
  const keepers = DROP.flatMap((drop, l) => (drop[i] >= T ? [DATA.layers[l]] : []));
  parts.push(make("p", { id: "lives" }, keepers.length === 0 ? "No layer keeps it to the end." : keepers.length === L ? "Every layer keeps it to the end." : `Kept to the end in ${keepers.length === 1 ? "layer" : "layers"} ${keepers.join(", ")}.`));
  parts.push(lifeBars(i));
  const list = make("p", { id: "dropped-list" });
  if (dropped.size === 0) list.append("It dropped nothing", view.layer === ALL ? " in any layer." : " here.");
  else {
    list.append(`It dropped ${dropped.size} ${dropped.size === 1 ? "token" : "tokens"}: `);
    const most = 40;
    for (const j of [...dropped.keys()].sort((a, b) => a - b).slice(0, most)) list.append(tokenButton(j), " ");
    if (dropped.size > most) list.append(`and ${dropped.size - most} more`);
  }
  parts.push(list);
  body.replaceChildren(...parts);
}

// the token above or below: the nearest in x on the adjacent line
function vertical(i, down) {
  const here = spans[i].getBoundingClientRect();
  let best = i, top = null, distance = Infinity;
  for (let n = i + (down ? 1 : -1); n >= 0 && n < T; n += down ? 1 : -1) {
    const box = spans[n].getBoundingClientRect();
    if (Math.abs(box.top - here.top) < 4 || box.width === 0) continue;
    if (top === null) top = box.top;
    if (Math.abs(box.top - top) > 4) break;
    const far = Math.abs(box.left - here.left);
    if (far < distance) [best, distance] = [n, far];
  }
  return best;
}

function focusToken(i) {
  const last = text.querySelector('[tabindex="0"]');
  if (last) last.tabIndex = -1;
  spans[i].tabIndex = 0;
  spans[i].focus();
}

function listenText() {
  const tokenOf = (event) => {
    const span = event.target.closest?.(".t");
    return span && span.dataset.i !== undefined ? Number(span.dataset.i) : -1;
  };
  text.addEventListener("pointerover", (event) => {
    const i = tokenOf(event);
    if (i >= 0 && event.pointerType !== "touch") change({ focus: i });
  });
  text.addEventListener("pointerleave", () => change({ focus: -1 }));
  text.addEventListener("scroll", () => { if (subject() >= 0) paintSubject(); }, { passive: true });
  text.addEventListener("focusin", (event) => change({ focus: tokenOf(event) }));
  text.addEventListener("focusout", () => change({ focus: -1 }));
  text.addEventListener("click", (event) => {
    const i = tokenOf(event);
    if (i >= 0) change({ selected: view.selected === i ? -1 : i });
  });
  text.addEventListener("keydown", (event) => {
    const i = tokenOf(event);
    if (i < 0) return;
    const steps = { ArrowLeft: i - 1, ArrowRight: i + 1, Home: 0, End: T - 1 };
    let to = steps[event.key];
    if (event.key === "ArrowUp" || event.key === "ArrowDown") to = vertical(i, event.key === "ArrowDown");
    if (event.key === "Enter") change({ selected: view.selected === i ? -1 : i });
    else if (to === undefined) return;
    else focusToken(Math.max(0, Math.min(T - 1, to)));
    event.preventDefault();
  });
}

listeners.push((changed, before) => {
  if (changed("layer")) for (let i = 0; i < T; i++) paint(i);
  else if (changed("t")) paintTime(before.t);
  if (changed("t") && view.playing) follow();
  if (changed("focus") || changed("selected") || changed("layer")) paintSubject();
  if (changed("focus") || changed("selected") || changed("layer") || (changed("t") && subject() >= 0)) drawDetail();
});
