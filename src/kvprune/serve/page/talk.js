// The conversation: messages whose text is the tokens of the last request, shaded by who holds them.

const NAMES = { system: "System", user: "You", assistant: "Model", text: "Text" };
const talk = { mode: "chat", messages: [], id: null };
const host = byId("talk");

// spans of a record by token, and the shade that each has on screen
const drawn = new Map();

function drawingOf(record) {
  if (!drawn.has(record)) drawn.set(record, { spans: [], shades: [] });
  return drawn.get(record);
}

// as templates write them
const SPECIAL = /^(<[^<>\s]+>|\[[^[\]\s]+\])/;

// the blank before a word is not part of its tint
function appendToken(place, record, i) {
  const [, blank, words] = record.tokens[i].text.match(/^((?:[^\S\n]+(?=\S))?)(.*)$/s);
  const span = make("span", { class: "t", tabindex: "-1", "data-i": i, "data-side": stage.records.indexOf(record) }, words);
  if (words === "") span.classList.add("part");
  else if (words.includes("\n")) span.classList.add("break");
  if (SPECIAL.test(words)) span.classList.add("special");
  if (i === record.prompt) span.classList.add("first-written");
  place.append(blank, span);
  const { spans, shades } = drawingOf(record);
  spans[i] = span;
  shades[i] = -1;
  paint(record, i);
}

function paint(record, i) {
  const { spans, shades } = drawingOf(record), span = spans[i];
  if (!span) return;
  const t = Math.min(view.t, record.last);
  const shade = i > t ? 2 : record.share(i, t, Math.min(view.layer, record.layers - 1));
  const now = view.t !== Infinity && i === t;
  if (now !== span.classList.contains("now")) span.classList.toggle("now", now);
  if (shade === shades[i]) return;
  shades[i] = shade;
  span.classList.toggle("future", shade === 2);
  span.classList.toggle("gone", shade === 0);
  span.style.setProperty("--held", shade === 2 ? 0 : +shade.toFixed(3));
}

function paintAll() {
  for (const record of stage.records) drawingOf(record).spans.forEach((_, i) => paint(record, i));
}

function paintNews() {
  for (const record of stage.records) {
    for (const i of record.changed) paint(record, i);
    record.changed.clear();
  }
}

// Where each message is in the text that the model read: [first token, token after it] or null.
// The template of the model is known to the server alone; its own words are found again in order.
function placesOf(record, messages) {
  const starts = [];
  let text = "";
  for (const token of record.tokens) {
    starts.push(text.length);
    text += token.text;
  }
  const tokenAt = (place) => {
    let low = 0, high = starts.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (starts[middle] < place) low = middle + 1;
      else high = middle;
    }
    return low;
  };
  const find = (words, from) => {
    const first = text.indexOf(words, from);
    // a message such as "user" is a word of the template too: the one before a special token is it
    for (let at = first; at >= 0; at = text.indexOf(words, at + 1)) {
      if (SPECIAL.test(text.slice(at + words.length).trimStart())) return at;
    }
    return first;
  };
  let from = 0;
  return messages.map(({ text: words, run }) => {
    const own = run?.record === record || run?.dense?.record === record;
    if (own && !run.base) return [record.prompt, Infinity];
    const whole = own ? run.base : words;
    // templates may trim a message
    const sought = [whole, whole.trim()].find((each) => from >= 0 && each && find(each, from) >= 0);
    const at = sought ? find(sought, from) : -1;
    if (!whole.trim() && !own) return null;
    if (at < 0) {
      from = -1;
      return own ? [record.prompt, Infinity] : null;
    }
    from = at + sought.length;
    return [tokenAt(at), own ? Infinity : tokenAt(from)];
  });
}

function textHost(name, side = 0) {
  return make("div", { class: "text", dir: "auto", role: "group", "aria-label": name, "data-side": side });
}

function fillTokens(place, record, from, to) {
  for (let i = from; i < Math.min(to, record.tokens.length); i++) appendToken(place, record, i);
  // one of them is reached by tab, the others by arrow keys
  if (!place.querySelector('[tabindex="0"]')) place.querySelector(".t")?.setAttribute("tabindex", "0");
}

// where new tokens of the answers go, by side
let ends = [];

function draw() {
  drawn.clear();
  ends = [];
  const { messages } = talk;
  if (messages.length === 0) host.replaceChildren(welcome());
  else if (talk.mode === "completion" || (view.raw && current())) host.replaceChildren(drawRaw());
  else host.replaceChildren(...drawMessages());
  drawMeta();
}

function drawMessages() {
  const record = current(), parts = [], system = record?.system ? [{ role: "system", text: record.system }] : [];
  const messages = [...system, ...talk.messages], places = record?.tokens.length ? placesOf(record, messages) : [];
  let next = 0;
  messages.forEach((message, n) => {
    const place = places[n] ?? null, template = make("span", { class: "template" });
    if (place) {
      // a long stretch of the template, such as a system prompt of its own, is a text to be read
      if (place[0] - next > 12) {
        parts.push(make("article", { class: "message system" }, messageHead("Template"), textHost("Template")));
        fillTokens(parts.at(-1).lastChild, record, next, place[0]);
      } else fillTokens(template, record, next, place[0]);
      next = place[1];
    }
    parts.push(drawMessage(message, n - system.length, template, place));
  });
  return parts;
}

function messageHead(name, ...parts) {
  return make("div", { class: "head" }, make("h2", {}, name), ...parts);
}

function drawMessage(message, n, template, place) {
  const { role, run } = message;
  const tools = make("span", n < 0 ? {} : { class: "tools", "data-n": n });
  const element = make("article", { class: `message ${role}` }, messageHead(NAMES[role], template, make("span", { class: "room" }), tools));
  if (message.editing) {
    element.append(editor(message, n));
    return element;
  }
  if (run?.dense) element.append(drawPair(run, place));
  else element.append(drawAnswer(message, place, 0));
  if (run) element.append(make("p", { class: "meta quiet", "data-n": n }));
  return element;
}

function drawAnswer(message, place, side) {
  const record = stage.records[side], body = textHost(NAMES[message.role], side);
  if (place && record?.tokens.length) {
    // an answer that goes on, but whose first part was not found again
    if (message.run?.base && place[0] === record.prompt) body.append(message.run.base);
    fillTokens(body, record, ...place);
  }
  // what the server does not report token by token, or has not yet
  else body.append(message.text);
  if (place?.[1] === Infinity || (message.run && message.run.status !== "done" && !place)) ends[side] = { body, message };
  return body;
}

// the same request pruned and dense, beside each other
function drawPair(run, place) {
  const sides = [run, run.dense].map((each, side) => {
    // an earlier pruned answer is part of the conversation, the other one of the past
    const found = side === 0 ? place : stage.records[1] === each.record ? [each.record.prompt, Infinity] : null;
    const body = drawAnswer({ role: "assistant", text: each.text, run: each }, found, side);
    const title = side ? "Nothing dropped" : "Pruned";
    return make("div", { class: "side", "data-side": side }, make("h3", {}, title, " ", make("span", { class: "quiet side-note" })), body);
  });
  return make("div", { class: "pair" }, ...sides);
}

// one text as the model reads it
function drawRaw() {
  const record = current(), last = talk.messages.at(-1), run = last.run;
  const tools = make("span", { class: "tools", "data-n": talk.messages.length - 1 });
  const name = talk.mode === "completion" ? "Text" : "As the model reads it";
  const element = make("article", { class: "message raw" }, messageHead(name, make("span", { class: "room" }), tools));
  const whole = talk.messages.map(({ text }) => text).join("");
  if (last.editing) {
    element.append(editor({ role: "text", text: whole }, talk.messages.length - 1));
    return element;
  }
  const body = textHost(name);
  if (!record?.tokens.length || (run && run.record !== record && talk.mode === "completion")) body.append(whole);
  else fillTokens(body, record, 0, run?.dense ? record.prompt : Infinity);
  element.append(body);
  if (run?.dense) element.append(drawPair(run, [run.record.prompt, Infinity]));
  else ends[0] = { body, message: last };
  if (run) element.append(make("p", { class: "meta quiet", "data-n": talk.messages.length - 1 }));
  return element;
}

// new tokens of a record that is on screen
function appendNews() {
  stage.records.forEach((record, side) => {
    const end = ends[side];
    if (!end || record.tokens.length === 0) return;
    const { spans } = drawingOf(record);
    fillTokens(end.body, record, Math.max(spans.length, record.prompt), record.tokens.length);
  });
}

// the text of an answer whose tokens are not reported
function appendPlain(run, words) {
  const side = run.isDense ? 1 : 0;
  if (run.record.tokens.length === 0) ends[side]?.body.append(words);
}

const EXAMPLES = [
  "Explain in a few sentences why the sky is blue.",
  "Write a short story about a lighthouse keeper who forgets one thing every day.",
  "List five rules for naming variables, each with an example.",
];

function welcome() {
  const list = make("div", { class: "examples" });
  for (const words of talk.mode === "chat" ? EXAMPLES : ["Once upon a time, in a lighthouse by the sea,", "The three most important discoveries of the last century were"]) {
    list.append(makeButton(words, () => { byId("prompt").value = words; grow(); byId("prompt").focus(); }));
  }
  return make("div", { class: "welcome" },
    make("p", { class: "lead" }, "Watch it forget."),
    make("p", { class: "quiet" }, "As the model reads and writes, each of its layers drops the tokens it no longer needs. Here they fade while it happens. Point at a token to see who dropped it, choose a layer, move back in time."),
    list);
}

listeners.push((changed, old) => {
  if (changed("raw")) draw();
  else if (changed("layer", "t")) paintAll();
  if (changed("news")) {
    appendNews();
    paintNews();
  }
  if (changed("fade")) document.body.classList.toggle("plain", !view.fade);
  if (changed("playing")) document.body.classList.toggle("playing", view.playing);
});
