// The view: the state of the page. Parts subscribe to changes, which are drawn once per frame.

// side: which of two records; wide: whether a curve shows all later tokens; strip: what is drawn
// under the text; miss, back: the chosen token that suffered, and the one brought back for it
const view = { t: T - 1, layer: ALL, focus: -1, selected: -1, playing: false, side: 0, wide: false, strip: "none", miss: -1, back: -1 };
const listeners = [];
let pending = null;

function change(values) {
  pending = { ...(pending || { before: { ...view } }) };
  Object.assign(view, values);
  if (!pending.frame) pending.frame = requestAnimationFrame(flush);
}

function flush() {
  const before = pending.before;
  pending = null;
  const changed = (name) => (name === "subject" ? subject(before) !== subject() : before[name] !== view[name]);
  for (const listener of listeners) listener(changed, before);
}

// the token whose details are shown: the one under the pointer or keyboard focus, else the selected one
function subject(state = view) {
  return state.focus >= 0 ? state.focus : state.selected;
}

function current() {
  return RECORDS[view.side];
}

function byId(id) {
  return document.getElementById(id);
}

// an element whose text is never parsed as HTML
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

function makeSvg(tag, attributes = {}) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// a token as shown within a sentence
function shown(i) {
  const token = DATA.tokens[i];
  if (token === "") {
    let last = i;
    while (last < T - 1 && DATA.tokens[last] === "") last++;
    return `part of “${DATA.tokens[last].trim()}”`;
  }
  const visible = token.replace(/\n/g, "↵").replace(/\t/g, "⇥");
  return `“${visible.trim() === "" ? visible.replace(/ /g, "␣") : visible.trim()}”`;
}

// a token that is part of a word, with that word
const JOINS = (i) => i > 0 && i < T && /^[\p{L}\p{N}]/u.test(DATA.tokens[i]) && /[\p{L}\p{N}]$/u.test(DATA.tokens[i - 1]);
function inWord(i) {
  let first = i, last = i;
  while (JOINS(first)) first--;
  while (JOINS(last + 1)) last++;
  return first === last ? shown(i) : `${shown(i)} of “${DATA.tokens.slice(first, last + 1).join("").trim()}”`;
}

function percent(share) {
  return `${Math.round(100 * share)} %`;
}

// with a true minus sign, and a plus on request
function decimal(value, digits = 2, plus = false) {
  const text = Math.abs(value).toFixed(digits);
  if (Number(text) === 0) return text;
  return value < 0 ? `−${text}` : plus ? `+${text}` : text;
}

// a setting as it was given: no zeros behind the point
function brief(value) {
  return decimal(value, 4).replace(/\.?0+$/, "");
}

function plural(count, word) {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}

function bytes(count) {
  if (count < 1024) return `${count} B`;
  const kib = count / 1024;
  return kib < 1024 ? `${kib.toFixed(kib < 10 ? 1 : 0)} KiB` : `${(kib / 1024).toFixed(1)} MiB`;
}

let palette = null;
function colours() {
  if (!palette) {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(name).trim();
    palette = { ink: read("--ink"), quiet: read("--quiet"), line: read("--line"), accent: read("--accent"), empty: read("--empty"), warm: read("--warm") };
  }
  return palette;
}

// scale a canvas to the screen's resolution; returns its context in CSS pixels
function fitted(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}
