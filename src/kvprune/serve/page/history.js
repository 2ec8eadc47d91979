// Conversations in this browser: saved after each answer, opened again, exported, deleted.

const MOST_SAVED = 100, FORMAT = "kvprune conversation";

function plainMessages() {
  return talk.messages.map(({ role, text }) => ({ role, text }));
}

function saveTalk() {
  if (!talk.messages.length) return;
  talk.id ??= `${Date.now()}-${Math.random().toString(36).slice(2, 8)}`;
  const saved = remembered("history", []).filter(({ id }) => id !== talk.id);
  saved.unshift({ id: talk.id, time: Date.now(), mode: talk.mode, messages: plainMessages() });
  // the oldest make room when the browser has none left
  let kept = saved.slice(0, MOST_SAVED);
  while (kept.length && !remember("history", kept)) kept = kept.slice(0, Math.floor(kept.length / 2));
}

function openTalk({ id = null, mode, messages, records = [] }) {
  stop();
  talk.id = id;
  talk.mode = mode;
  talk.messages = messages.map(({ role, text }) => ({ role, text }));
  const loaded = records.map(Record.load), last = talk.messages.at(-1);
  if (loaded.length && last?.role === "assistant") {
    last.run = newRun({ record: loaded[0], status: "done", base: records[0].base ?? "", text: last.text.slice((records[0].base ?? "").length) });
    if (loaded[1]) last.run.dense = newRun({ record: loaded[1], status: "done", isDense: true, text: loaded[1].tokens.slice(loaded[1].prompt).map(({ text }) => text).join("") });
  }
  setStage(loaded);
  setMode(mode);
  draw();
  drawState();
}

function newTalk() {
  openTalk({ mode: talk.mode, messages: [] });
  byId("prompt").focus();
}

function drawSaved() {
  const saved = remembered("history", []);
  byId("saved").replaceChildren(...saved.map((each) => {
    const title = each.messages.find(({ role }) => role !== "system")?.text.trim().slice(0, 90) || "(empty)";
    const open = makeButton("", () => { openTalk(each); byId("history").close(); }, { class: "open" });
    open.append(make("span", { class: "title", dir: "auto" }, title), make("span", { class: "quiet" }, `${new Date(each.time).toLocaleString()} · ${plural(each.messages.length, "message")}`));
    const remove = makeButton("✕", () => {
      remember("history", remembered("history", []).filter(({ id }) => id !== each.id));
      drawSaved();
    }, { class: "delete", "aria-label": `Delete: ${title}` });
    return make("li", {}, open, remove);
  }));
  if (!saved.length) byId("saved").append(make("li", { class: "quiet" }, "Nothing yet."));
  byId("export").disabled = talk.messages.length === 0;
  byId("forget-all").disabled = saved.length === 0;
}

// with what was dropped, so that it can be watched again without a server; never the key
function exported() {
  const run = talk.messages.at(-1)?.run;
  const runs = [run, run?.dense].filter((each) => each?.record.tokens.length);
  return { format: FORMAT, version: 1, model: server.model, mode: talk.mode, settings, messages: plainMessages(), records: runs.map((each) => ({ base: each.base, ...each.record.save() })) };
}

function download() {
  const address = URL.createObjectURL(new Blob([JSON.stringify(exported())], { type: "application/json" }));
  make("a", { href: address, download: `kvprune-${new Date().toISOString().slice(0, 16).replace(/[:T]/g, "-")}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

async function openFile(file) {
  try {
    const data = JSON.parse(await file.text());
    if (data.format !== FORMAT) throw new Error("it has another format");
    openTalk(data);
    byId("history").close();
  } catch (error) {
    byId("history").close();
    showTrouble(`${file.name} is no conversation of this page: ${error.message}`);
  }
}

function listenHistory() {
  byId("new").addEventListener("click", newTalk);
  byId("history-button").addEventListener("click", () => { drawSaved(); byId("history").showModal(); });
  byId("history-close").addEventListener("click", () => byId("history").close());
  byId("export").addEventListener("click", download);
  byId("import").addEventListener("click", () => byId("file").click());
  byId("file").addEventListener("change", ({ target }) => {
    if (target.files[0]) openFile(target.files[0]);
    target.value = "";
  });
  byId("forget-all").addEventListener("click", () => { remember("history", null); drawSaved(); });
}
