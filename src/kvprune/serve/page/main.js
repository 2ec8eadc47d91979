// The controls, and the initial state.

function showTrouble(words) {
  byId("trouble").textContent = words;
  byId("trouble").hidden = false;
}

function clearTrouble() {
  byId("trouble").hidden = true;
}

// scrolling: along with the answer while its end is in view, and never against the reader
let follows = true, lastY = 0;

// from the end of the conversation, with its margin, to where it would be in view
function distance() {
  return host.getBoundingClientRect().bottom + 28 - byId("composer").getBoundingClientRect().top;
}

function follow(now = false) {
  if (now) follows = true;
  if (follows) window.scrollBy(0, Math.max(0, distance()));
  lastY = window.scrollY;
  showLatest();
}

function showLatest() {
  byId("latest").hidden = follows || !busy();
}

function listenScroll() {
  window.addEventListener("scroll", () => {
    if (window.scrollY < lastY - 1) follows = false;
    if (distance() < 4) follows = true;
    lastY = window.scrollY;
    showLatest();
  }, { passive: true });
  byId("latest").addEventListener("click", () => follow(true));
}

// what is spoken: whole sentences, as they are complete, once
let unspoken = "";

function startSpeaking() {
  unspoken = "";
  byId("spoken").replaceChildren();
}

function speak(words) {
  unspoken += words;
  const end = Math.max(...[...unspoken.matchAll(/[.!?…]["”')\]]*\s|\n/g)].map((match) => match.index + match[0].length), 0);
  if (!end) return;
  say(unspoken.slice(0, end));
  unspoken = unspoken.slice(end);
}

function say(words) {
  if (words.trim()) byId("spoken").append(make("p", {}, words.trim()));
}

function stopSpeaking({ status }) {
  say(unspoken);
  unspoken = "";
  if (status !== "failed") say(status === "stopped" ? "Stopped." : "The answer is complete.");
}

// the message box grows with its text
function grow() {
  const box = byId("prompt");
  box.style.height = "auto";
  box.style.height = `${Math.min(box.scrollHeight + 2, Math.round(window.innerHeight * 0.35))}px`;
}

function drawState() {
  byId("send").hidden = busy();
  byId("stop").hidden = !busy();
  host.classList.toggle("busy", busy());
  for (const input of document.querySelectorAll('input[name="mode"]')) input.disabled = busy();
  const box = byId("prompt");
  const words = talk.mode === "chat" ? "Message" : talk.messages.length ? "More text, then go on" : "Text to go on from";
  box.placeholder = words;
  box.setAttribute("aria-label", words);
  follow();
}

function drawGauge() {
  const run = talk.messages.at(-1)?.run, record = current();
  byId("speed").textContent = run && speedOf(run) ? `${speedOf(run).toFixed(1)} tokens/s` : "";
  const used = record?.tokens.length ?? 0, { positions } = server, gauge = byId("gauge");
  byId("context-note").textContent = used ? (positions ? `${count(used)} of ${count(positions)} tokens` : plural(used, "token")) : "";
  gauge.hidden = !(used && positions);
  gauge.setAttribute("aria-valuenow", used);
  gauge.setAttribute("aria-valuemax", positions ?? used);
  gauge.firstChild.style.width = `${Math.min(100, (100 * used) / (positions || 1))}%`;
  gauge.classList.toggle("full", positions !== null && used > 0.9 * positions);
}

function setMode(mode) {
  talk.mode = mode;
  document.querySelector(`input[name="mode"][value="${mode}"]`).checked = true;
  byId("raw").closest("label").hidden = mode === "completion";
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  remember("theme", name);
  repaint();
}

// what is drawn on a canvas does not follow the theme by itself
function repaint() {
  palette = null;
  if (current()) drawMap();
}

function isDark() {
  const { theme } = document.documentElement.dataset;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function setFade(on) {
  byId("fade").checked = on;
  remember("fade", on);
  change({ fade: on });
}

function drawAbout() {
  const set = NUMBERS.filter((name) => settings[name] !== undefined && name !== "max_tokens").map((name) => `${name.replace("_", " ")} ${settings[name]}`);
  byId("about").textContent = ["served by kvprune", server.positions ? `${count(server.positions)} positions` : "", ...set, settings.system.trim() ? "system prompt" : ""].filter(Boolean).join(" · ");
}

function listenSettings() {
  const dialog = byId("settings");
  byId("settings-button").addEventListener("click", () => dialog.showModal());
  byId("system").value = settings.system;
  byId("key").value = key;
  for (const name of NUMBERS) dialog.querySelector(`[name="${name}"]`).value = settings[name] ?? "";
  dialog.addEventListener("input", ({ target }) => {
    if (target.id === "key") setKey(target.value.trim());
    else if (target.id === "system") setSetting("system", target.value);
    else setSetting(target.name, target.value === "" || !target.validity.valid ? undefined : Number(target.value));
    drawAbout();
  });
  dialog.addEventListener("close", () => {
    // a key may open what was closed
    if (!server.model) readModel();
    if (!batch.connected && !watching) watchBatch();
  });
}

function listenComposer() {
  const box = byId("prompt");
  byId("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  byId("stop").addEventListener("click", () => { stop(); box.focus(); });
  box.addEventListener("input", grow);
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    } else if (event.key === "ArrowUp" && !box.value && talk.mode === "chat") {
      const n = talk.messages.findLastIndex(({ role }) => role === "user");
      if (n < 0 || busy()) return;
      event.preventDefault();
      edit(n);
    }
  });
  for (const input of document.querySelectorAll('input[name="mode"]')) {
    input.addEventListener("change", () => openTalk({ mode: input.value, messages: [] }));
  }
  byId("fade").addEventListener("change", ({ target }) => setFade(target.checked));
  byId("raw").addEventListener("change", ({ target }) => change({ raw: target.checked }));
}

function listenKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.key === "Escape") return busy() ? stop() : change({ subject: null });
    const { target } = event;
    if (target.closest?.("textarea, select, input:not([type=radio], [type=checkbox], [type=range])")) return;
    const onControl = target.closest?.("button, input");
    const keys = {
      " ": onControl ? null : togglePlay,
      ",": () => moveTime(-1),
      ".": () => moveTime(1),
      "[": () => stepLayer(-1),
      "]": () => stepLayer(1),
      0: () => change({ layer: ALL }),
      "/": () => byId("prompt").focus(),
      f: () => setFade(!view.fade),
      d: () => setTheme(isDark() ? "light" : "dark"),
      "?": () => byId("help").showModal(),
    };
    const act = keys[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
}

function listenPage() {
  byId("theme").addEventListener("click", () => setTheme(isDark() ? "light" : "dark"));
  byId("help-button").addEventListener("click", () => byId("help").showModal());
  byId("help-close").addEventListener("click", () => byId("help").close());
  for (const dialog of document.querySelectorAll("dialog")) {
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  }
  const panel = (open) => {
    document.body.classList.toggle("panel-open", open);
    byId("panel-button").setAttribute("aria-expanded", open);
    if (open) drawMemory();
    byId(open ? "panel-close" : "panel-button").focus();
  };
  byId("panel-button").addEventListener("click", () => panel(true));
  byId("panel-close").addEventListener("click", () => panel(false));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  // what sticks below the bar must know its height, and what sticks above the composer
  const measure = () => {
    const style = document.documentElement.style;
    style.setProperty("--below", `${byId("bar").offsetHeight}px`);
    style.setProperty("--above", `${byId("composer").offsetHeight}px`);
  };
  new ResizeObserver(measure).observe(byId("bar"));
  new ResizeObserver(() => { measure(); follow(); }).observe(byId("composer"));
  let resized = 0;
  window.addEventListener("resize", () => {
    cancelAnimationFrame(resized);
    resized = requestAnimationFrame(() => { drawMemory(); drawSubject(); });
  });
}

async function readModel() {
  try {
    const { data } = await (await call("v1/models")).json();
    server.model = data[0].id;
    server.positions = data[0].max_model_len ?? null;
    clearTrouble();
  } catch (error) {
    showTrouble(error.status === 401 ? "This server asks for an API key: enter it in the settings." : error.message);
  }
  byId("model").textContent = server.model ?? "kvprune";
  document.title = server.model ? `${server.model} · kvprune` : "kvprune";
  drawAbout();
  drawGauge();
}

listeners.push((changed) => {
  if (changed("news")) follow();
});

const theme = remembered("theme", null);
if (theme) document.documentElement.dataset.theme = theme;
byId("fade").checked = view.fade;
document.body.classList.toggle("plain", !view.fade);
listenTokens();
listenTime();
listenMap();
listenBatch();
listenHistory();
listenSettings();
listenComposer();
listenScroll();
listenKeys();
listenPage();
setMode("chat");
draw();
drawDetail();
drawState();
watchBatch();
readModel().then(() => { document.documentElement.dataset.ready = "true"; });
if (!narrow()) byId("prompt").focus();
