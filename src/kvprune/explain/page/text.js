// The text: one span per token in each pane, styled by the time; the token in focus, its threads.

const panes = RECORDS.map((record, side) => {
  const threads = makeSvg("svg", { class: "threads", "aria-hidden": "true" });
  const host = make("div", { id: side ? "other-text" : "text", class: "text", dir: "auto", role: "listbox", "aria-label": COMPARES ? `Tokens: ${record.name}` : "Tokens" });
  const frame = make("div", { class: "text-frame" }, threads, host);
  const title = make("h3", { class: "pane-name" }, record.name);
  const pane = make("div", { class: "pane", "data-side": side }, ...(COMPARES ? [title, frame] : [frame]));
  byId("panes").append(pane);
  return { record, side, host, frame, threads, pane, spans: [], marked: [] };
});

function buildText({ host, spans }) {
  const fragment = document.createDocumentFragment();
  for (let i = 0; i < T; i++) {
    // the blank before a word is not part of its tint
    const [, blank, token] = DATA.tokens[i].match(/^((?:[^\S\n]+(?=\S))?)(.*)$/s);
    const span = make("span", { class: "t", role: "option", tabindex: "-1", "data-i": i }, token);
    if (token === "") span.classList.add("part");
    else if (token.includes("\n")) span.classList.add("break");
    if (i === DATA.prompt) span.classList.add("first-written");
    spans.push(span);
    fragment.append(blank, span);
  }
  host.append(fragment);
  spans[0].tabIndex = 0;
}

// the style of a token at time t: kept or dropped in one layer, shaded by the share of all layers
function paint({ record, spans }, i) {
  const span = spans[i], { t, layer } = view;
  const list = span.classList;
  const alive = layer === ALL ? record.aliveLayers(i, t) / L : record.drop[layer][i] > t ? 1 : 0;
  list.toggle("future", i > t);
  list.toggle("now", i === t);
  list.toggle("gone", i <= t && alive === 0);
  list.toggle("held", i <= t && alive > 0);
  span.style.setProperty("--alive", layer === ALL ? alive.toFixed(2) : alive);
  if (COMPARES) paintDifference(i);
}

function paintTime(pane, before) {
  const low = Math.min(before, view.t), high = Math.max(before, view.t);
  const touched = new Uint8Array(T).fill(1, low, high + 1);
  // what the other record drops changes the mark of a difference
  for (const { events } of RECORDS) {
    for (const l of layersOf(view.layer)) {
      const { from, dropped } = events[l];
      for (let n = from[low]; n < from[high + 1]; n++) touched[dropped[n]] = 1;
    }
  }
  touched.forEach((is, i) => { if (is) paint(pane, i); });
}

// while playing, keep the current token in view
function follow({ host, spans }) {
  const top = spans[view.t].offsetTop - host.offsetTop;
  if (top < host.scrollTop || top > host.scrollTop + host.clientHeight - 48) host.scrollTop = wholeLines(host, top - 60);
}

// scroll positions at which no line is cut
function wholeLines(host, top) {
  const line = parseFloat(getComputedStyle(host).lineHeight);
  return Math.max(0, Math.round(top / line)) * line;
}

function mark(pane, i, name) {
  pane.spans[i].classList.add(name);
  pane.marked.push([i, name]);
}

// the dropper and the dropped of a token, by layer
function relations(record, i) {
  const droppers = new Map(), dropped = new Map();
  const add = (map, token, layer) => map.set(token, [...(map.get(token) || []), layer]);
  for (const l of layersOf(view.layer)) {
    if (record.drop[l][i] < T) add(droppers, record.drop[l][i], l);
    for (const j of record.droppedBy(l, i)) add(dropped, j, l);
  }
  return { droppers, dropped };
}

function paintSubject(pane) {
  for (const [i, name] of pane.marked) pane.spans[i].classList.remove(name);
  pane.marked = [];
  const i = subject();
  if (view.selected >= 0) mark(pane, view.selected, "selected");
  const missing = missMarks(pane);
  if (i >= 0) mark(pane, i, "focus");
  if (i >= 0 && missing.some(([j, name]) => j === i && name === "missed")) {
    // what it lacked is the question now, not what it dropped
    drawThreads(pane, i, { "to-lacked": missing.filter(([, name]) => name === "lacked").map(([j]) => j) });
  } else if (i >= 0) {
    const { droppers, dropped } = relations(pane.record, i);
    for (const j of dropped.keys()) mark(pane, j, "dropped");
    for (const j of droppers.keys()) mark(pane, j, "dropper");
    drawThreads(pane, i, { "to-dropped": [...dropped.keys()], "to-dropper": [...droppers.keys()] });
  } else pane.threads.replaceChildren();
  for (const [j, name] of missing) mark(pane, j, name);
  pane.host.querySelector("[aria-selected]")?.removeAttribute("aria-selected");
  pane.spans[view.selected]?.setAttribute("aria-selected", "true");
}

const MOST_THREADS = 120;
function drawThreads({ frame, threads, spans }, i, groups) {
  const box = frame.getBoundingClientRect();
  if (box.width === 0) return;
  threads.setAttribute("width", box.width);
  threads.setAttribute("height", box.height);
  const middle = (n) => {
    const place = spans[n].getClientRects()[0] || spans[n].getBoundingClientRect();
    return [place.left - box.left + place.width / 2, place.top - box.top + place.height / 2];
  };
  const [x, y] = middle(i);
  const paths = [];
  const thread = (n, name) => {
    const [u, v] = middle(n);
    const lift = Math.min(60, 14 + Math.hypot(x - u, y - v) / 5);
    const d = `M${x},${y} C${x},${y - lift} ${u},${v - lift} ${u},${v}`;
    paths.push(makeSvg("path", { d, class: name }));
  };
  for (const [name, tokens] of Object.entries(groups)) for (const n of tokens.slice(-MOST_THREADS)) thread(n, name);
  threads.replaceChildren(...paths);
}

function tokenButton(i) {
  const button = make("button", { type: "button", class: "token", "data-i": i }, shown(i));
  button.addEventListener("click", () => select(i));
  return button;
}

function select(i) {
  change({ selected: i, focus: i, miss: -1, back: -1 });
  if (i >= 0) reveal(i);
}

function reveal(i) {
  const { host, spans } = panes[view.side];
  const top = spans[i].offsetTop - host.offsetTop;
  const inside = host.scrollHeight > host.clientHeight;
  if (inside && (top < host.scrollTop || top > host.scrollTop + host.clientHeight - 30)) {
    host.scrollTop = wholeLines(host, top - host.clientHeight / 3);
  }
  // between the bar and, on a phone, the sheet of the token
  const { top: above, bottom: below } = spans[i].getBoundingClientRect();
  const from = byId("bar").getBoundingClientRect().bottom, to = window.innerHeight * (narrow() ? 0.6 : 0.96);
  if (above < from || below > to) window.scrollBy(0, (above + below - from - to) / 2);
}

function narrow() {
  return matchMedia("(max-width: 760px)").matches;
}

// the token above or below: the nearest in x on the adjacent line
function vertical(spans, i, down) {
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

function focusToken({ host, spans }, i) {
  const last = host.querySelector('[tabindex="0"]');
  if (last) last.tabIndex = -1;
  spans[i].tabIndex = 0;
  spans[i].focus();
}

function listenText(pane) {
  const { host, spans, side } = pane;
  const tokenOf = (event) => {
    const span = event.target.closest?.(".t");
    return span && span.dataset.i !== undefined ? Number(span.dataset.i) : -1;
  };
  const toggle = (i) => {
    change({ selected: view.selected === i ? -1 : i, side, miss: -1, back: -1 });
    if (narrow() && view.selected === i) reveal(i);
  };
  host.addEventListener("pointerover", (event) => {
    const i = tokenOf(event);
    if (i >= 0 && event.pointerType !== "touch") change({ focus: i });
  });
  host.addEventListener("pointerleave", () => change({ focus: -1 }));
  host.addEventListener("scroll", () => {
    for (const { host: other } of panes) if (Math.abs(other.scrollTop - host.scrollTop) > 1) other.scrollTop = host.scrollTop;
    if (subject() >= 0) paintSubject(pane);
  }, { passive: true });
  host.addEventListener("scrollend", () => {
    const whole = wholeLines(host, host.scrollTop), bottom = host.scrollHeight - host.clientHeight;
    if (host.scrollTop < bottom - 1 && Math.abs(whole - host.scrollTop) > 0.5) host.scrollTo({ top: whole, behavior: "smooth" });
  });
  host.addEventListener("focusin", (event) => change({ focus: tokenOf(event) }));
  host.addEventListener("focusout", () => change({ focus: -1 }));
  host.addEventListener("click", (event) => {
    const i = tokenOf(event);
    if (i >= 0) toggle(i);
  });
  host.addEventListener("keydown", (event) => {
    const i = tokenOf(event);
    if (i < 0) return;
    const steps = { ArrowLeft: i - 1, ArrowRight: i + 1, Home: 0, End: T - 1 };
    let to = steps[event.key];
    if (event.key === "ArrowUp" || event.key === "ArrowDown") to = vertical(spans, i, event.key === "ArrowDown");
    if (event.key === "Enter") toggle(i);
    else if (to === undefined) return;
    else focusToken(pane, Math.max(0, Math.min(T - 1, to)));
    event.preventDefault();
  });
}

listeners.push((changed, before) => {
  for (const pane of panes) {
    if (changed("layer")) for (let i = 0; i < T; i++) paint(pane, i);
    else if (changed("t")) paintTime(pane, before.t);
    if (changed("t") && view.playing) follow(pane);
    if (["subject", "selected", "layer", "miss", "back", "side"].some(changed)) paintSubject(pane);
  }
});
