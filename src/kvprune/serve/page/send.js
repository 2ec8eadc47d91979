// Asking: send, stop, regenerate, go on, edit; the same request with nothing dropped beside it.

// so low that no score is below it
const KEEP_ALL = -1e9;
const server = { model: null, positions: null };
const underWay = new Set();

function busy() {
  return underWay.size > 0;
}

function newRun(values = {}) {
  return { record: new Record(), text: "", base: "", status: "waiting", finish: null, error: null, usage: null, id: null, made: 0, started: 0, first: 0, last: 0, dense: null, isDense: false, abort: new AbortController(), ...values };
}

function requestBody(run, question, seed) {
  const body = { stream: true, stream_options: { include_usage: true }, kvprune: { report: true }, ...question };
  if (server.model) body.model = server.model;
  for (const name of NUMBERS) {
    const value = settings[name];
    if (value !== undefined) (OURS.includes(name) ? body.kvprune : body)[name] = value;
  }
  if (seed !== undefined) body.seed = seed;
  if (run.isDense) body.kvprune.threshold = KEEP_ALL;
  return body;
}

function chatQuestion(messages) {
  const system = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  return { messages: [...system, ...messages.filter(({ text }) => text).map(({ role, text }) => ({ role, content: text }))] };
}

// ask for an answer to the conversation so far; with `base`, go on from the last answer
async function answer({ base = null, question = null } = {}) {
  if (busy()) return;
  clearTrouble();
  const goesOn = base !== null, compare = !goesOn && byId("compare").checked;
  const asked = question ?? (talk.mode === "chat" ? chatQuestion(talk.messages) : { prompt: talk.messages[0].text });
  if (!goesOn) talk.messages.push({ role: "assistant", text: "" });
  const message = talk.messages.at(-1), run = newRun({ base: base ?? "" });
  message.run = run;
  if (talk.mode === "chat") run.record.system = settings.system.trim();
  if (compare) run.dense = newRun({ isDense: true });
  // two samples are comparable only if they are drawn alike
  const seed = settings.seed ?? (compare ? Math.floor(Math.random() * 2 ** 31) : undefined);
  const path = "prompt" in asked ? "v1/completions" : "v1/chat/completions";
  const runs = [run, run.dense].filter(Boolean);
  runs.forEach((each) => underWay.add(each));
  startSpeaking();
  draw();
  follow(true);
  drawState();
  const { messages } = talk;
  await Promise.all(runs.map((each) => pursue(message, each, path, requestBody(each, asked, seed))));
  drawState();
  // another conversation was opened meanwhile
  if (talk.messages !== messages) return;
  stopSpeaking(run);
  if (run.record.tokens.length === 0 && run.status === "done") setStage([]);
  if (!message.text && run.status === "stopped" && !run.dense?.text) {
    messages.pop();
    draw();
  } else drawMeta();
  saveTalk();
}

async function pursue(message, run, path, body) {
  run.started = performance.now();
  try {
    for await (const chunk of chunksOf(path, body, run.abort.signal)) takeChunk(message, run, chunk);
    run.status = "done";
  } catch (error) {
    if (error.name === "AbortError") run.status = "stopped";
    else if (run.finish) run.status = "done";
    else [run.status, run.error] = ["failed", error];
  }
  underWay.delete(run);
  change({ news: view.news + 1 });
}

function takeChunk(message, run, chunk) {
  if (run.abort.signal.aborted) return;
  const choice = chunk.choices?.[0], words = choice?.delta?.content ?? choice?.text ?? "", news = chunk.kvprune;
  run.id ??= chunk.id ?? null;
  run.usage = chunk.usage ?? run.usage;
  run.finish = choice?.finish_reason ?? run.finish;
  const had = run.record.tokens.length;
  if (news) run.record.take(news);
  const made = news?.tokens?.length ?? (words ? 1 : 0);
  if (made) {
    run.last = performance.now();
    run.first ||= run.last;
    if (run.status === "waiting") run.status = "answering";
    run.made += made;
  }
  run.text += words;
  if (!run.isDense) {
    message.text = run.base + run.text;
    speak(words);
  }
  if (had === 0 && run.record.tokens.length) {
    setStage([message.run.record, ...(message.run.dense ? [message.run.dense.record] : [])]);
    draw();
  } else appendPlain(run, words);
  change({ news: view.news + 1 });
}

function stop() {
  for (const run of underWay) run.abort.abort();
}

function send() {
  const box = byId("prompt"), words = box.value;
  if (busy()) return;
  if (talk.mode === "completion") {
    const text = talk.messages.map((message) => message.text).join("") + words;
    if (!text) return;
    talk.messages = [{ role: "text", text }];
  } else {
    if (!words.trim()) return;
    talk.messages.push({ role: "user", text: words });
  }
  box.value = "";
  grow();
  answer();
}

function regenerate() {
  if (busy()) return;
  if (talk.messages.at(-1).role === "assistant") talk.messages.pop();
  answer();
}

// the tokens of an answer, without an end token that is not part of its text
function idsSoFar({ record, text, finish }) {
  const tokens = [...record.tokens];
  let length = tokens.slice(record.prompt).reduce((sum, token) => sum + token.text.length, 0);
  while (finish === "stop" && tokens.length > record.prompt && length > text.length) length -= tokens.pop().text.length;
  return tokens.map(({ id }) => id);
}

function goOn() {
  const message = talk.messages.at(-1), { run } = message;
  if (busy()) return;
  // by the very tokens it has read and written: exact, and found again as a prefix
  if (run?.record.tokens.length) answer({ base: message.text, question: { prompt: idsSoFar(run), min_tokens: 1 } });
  else if (talk.mode === "completion") answer({ base: message.text, question: { prompt: talk.messages.map(({ text }) => text).join("") } });
  else answer({ base: message.text, question: { ...chatQuestion(talk.messages), continue_final_message: true, add_generation_prompt: false } });
}

function edit(n) {
  if (busy()) return;
  talk.messages.forEach((message, m) => { message.editing = m === n; });
  draw();
  host.querySelector(".editor textarea")?.focus();
}

function editor(message, n) {
  const asks = message.role !== "assistant";
  const box = make("textarea", { "aria-label": `Edit: ${NAMES[message.role]}`, rows: Math.min(16, message.text.split("\n").length + 1 + Math.floor(message.text.length / 90)) });
  box.value = message.text;
  const done = () => {
    const words = box.value;
    if (asks && !words.trim()) return;
    if (message.role === "text") talk.messages = [{ role: "text", text: words }];
    else if (asks) talk.messages = [...talk.messages.slice(0, n), { role: "user", text: words }];
    else talk.messages[n] = { role: "assistant", text: words };
    if (asks) return answer();
    draw();
    saveTalk();
  };
  const cancel = () => {
    delete talk.messages[n].editing;
    draw();
    host.querySelector(`.tools[data-n="${n}"] button`)?.focus();
  };
  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") cancel();
    else if (event.key === "Enter" && !event.shiftKey && !event.isComposing && message.role !== "text") done();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  return make("div", { class: "editor" }, box, make("div", { class: "editor-buttons" }, makeButton(asks ? "Send" : "Save", done, { class: "primary" }), makeButton("Cancel", cancel)));
}

async function explain(run) {
  // opened at once, while the browser still takes it for the user's wish
  const tab = window.open("", "_blank");
  try {
    const page = await (await call(`v1/traces/${encodeURIComponent(run.id)}`)).text();
    const address = URL.createObjectURL(new Blob([page], { type: "text/html" }));
    if (tab) {
      tab.opener = null;
      tab.location.replace(address);
    }
    setTimeout(() => URL.revokeObjectURL(address), 60000);
  } catch (error) {
    tab?.close();
    showTrouble(error.status === 404 ? "The server no longer has the trace of this answer: regenerate it." : error.message);
  }
}

function toolsOf(message, n) {
  const { role, run } = message, last = n === talk.messages.length - 1, whole = talk.mode === "completion", tools = [];
  if (last) tools.push(makeButton(role === "assistant" ? "Regenerate" : "Answer", regenerate));
  if (last && role === "assistant" && message.text) tools.push(makeButton("Continue", goOn));
  if (run?.id && run.record.tokens.length) tools.push(makeButton("Explain", () => explain(run), { title: "Open the page that explains what was forgotten, and why" }));
  if (role === "assistant" && message.text) tools.push(makeButton("Copy", (event) => copy(event.target, message.text)));
  if (whole || !view.raw) tools.push(makeButton("Edit", () => edit(n)));
  return tools;
}

async function copy(button, words) {
  try {
    await navigator.clipboard.writeText(words);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

const ENDS = { length: "ended by the limit of new tokens", cancelled: "cancelled" };

// of what came in too short a time there is no speed to tell
function speedOf({ made, first, last }) {
  return last - first > 100 ? ((made - 1) * 1000) / (last - first) : 0;
}

function aboutRun(run) {
  const { made, first, started, status, finish, usage } = run, parts = [];
  if (status === "waiting") parts.push("waiting …");
  if (made) parts.push(plural(usage?.completion_tokens ?? made, "token"));
  if (speedOf(run)) parts.push(`${speedOf(run).toFixed(1)} tokens/s`);
  if (first) parts.push(`first after ${((first - started) / 1000).toFixed(2)} s`);
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (cached && !run.dense && !run.isDense) parts.push(`${count(cached)} of ${plural(usage.prompt_tokens, "prompt token")} not read again`);
  if (status === "stopped") parts.push("stopped");
  if (ENDS[finish]) parts.push(ENDS[finish]);
  return parts.join(" · ");
}

function failure({ error }) {
  const box = make("p", { class: "failure", role: "alert" }, error.message, " ");
  if (error.status === 401) box.append(makeButton("Enter a key", () => { byId("settings").showModal(); byId("key").focus(); }), " ");
  box.append(makeButton("Try again", regenerate));
  return box;
}

// what is told about each answer, and what can be done with it
function drawMeta() {
  for (const place of host.querySelectorAll(".tools")) {
    const n = Number(place.dataset.n);
    place.replaceChildren(...(busy() || talk.messages[n]?.editing ? [] : toolsOf(talk.messages[n], n)));
  }
  for (const place of host.querySelectorAll(".meta")) {
    const { run } = talk.messages[Number(place.dataset.n)];
    const failed = [run, run.dense].find((each) => each?.status === "failed");
    place.textContent = run.dense ? comparison(run) : aboutRun(run);
    if (failed && !place.nextElementSibling) place.after(failure(failed));
    place.parentElement.querySelectorAll(".side-note").forEach((note, side) => { note.textContent = aboutRun(side ? run.dense : run); });
  }
}

// how far the two answers agree; the first token that differs is underlined
function comparison({ record, dense }) {
  const one = record.tokens.slice(record.prompt), other = dense.record.tokens.slice(dense.record.prompt);
  const shorter = Math.min(one.length, other.length);
  let same = 0;
  while (same < shorter && one[same].id === other[same].id) same++;
  const differs = same < shorter || (one.length !== other.length && !busy());
  for (const element of host.querySelectorAll(".differs")) element.classList.remove("differs");
  if (differs) for (const each of [record, dense.record]) drawingOf(each).spans[each.prompt + same]?.classList.add("differs");
  if (!shorter) return "";
  return differs ? `The same for the first ${plural(same, "token")}, then they part.` : busy() ? `The same so far: ${plural(same, "token")}.` : `The same, all ${plural(same, "token")}.`;
}

listeners.push((changed) => {
  if (!changed("news")) return;
  drawMeta();
  drawGauge();
});
