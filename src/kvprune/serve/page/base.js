// Elements and words.

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

function makeButton(words, act, attributes = {}) {
  const button = make("button", { type: "button", ...attributes }, words);
  button.addEventListener("click", act);
  return button;
}

// a token as shown within a sentence
function quoted(token) {
  if (token === "") return "part of a character";
  const visible = token.replace(/\n/g, "↵").replace(/\t/g, "⇥");
  return `“${visible.trim() === "" ? visible.replace(/ /g, "␣") : visible.trim()}”`;
}

// layers 0, 1, 2, 5 as "0–2, 5"
function ranges(numbers) {
  const parts = [];
  for (let n = 0; n < numbers.length; n++) {
    const first = n;
    while (numbers[n + 1] === numbers[n] + 1) n++;
    parts.push(n > first + 1 ? `${numbers[first]}–${numbers[n]}` : n > first ? `${numbers[first]}, ${numbers[n]}` : `${numbers[n]}`);
  }
  return parts.join(", ");
}

function percent(share) {
  return `${Math.round(100 * share)} %`;
}

function count(number) {
  return Math.round(number).toLocaleString("en");
}

function plural(number, word) {
  return `${count(number)} ${word}${number === 1 ? "" : "s"}`;
}

function bytes(number) {
  if (number < 1024) return `${Math.round(number)} B`;
  const units = ["KiB", "MiB", "GiB"];
  let value = number / 1024, unit = 0;
  while (value >= 1024 && unit < 2) [value, unit] = [value / 1024, unit + 1];
  return `${value.toFixed(value < 100 ? 1 : 0)} ${units[unit]}`;
}

let palette = null;
function colours() {
  if (!palette) {
    const style = getComputedStyle(document.documentElement);
    palette = Object.fromEntries(["ink", "quiet", "line", "accent", "empty", "warm"].map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  }
  return palette;
}

// scale a canvas to the screen's resolution; returns its context in CSS pixels
function fitted(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

function narrow() {
  return matchMedia("(max-width: 860px)").matches;
}
