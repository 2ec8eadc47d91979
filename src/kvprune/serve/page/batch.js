// The batch, live from the engine: its rows in the budget, who comes in, who has to wait.

const batch = { status: null, states: new Map(), log: [], connected: false };
const STATES = { running: "runs", waiting: "waits", preempted: "preempted" };
const MOST_ROWS = 10, MOST_NEWS = 6;

function rowKey({ request, index }) {
  return `${request} ${index}`;
}

// requests of this page have names
function rowName({ request, index }) {
  for (const { run } of talk.messages) {
    if (run?.id === request) return "this chat";
    if (run?.dense?.id === request) return "this chat, dense";
  }
  const short = request.replace(/^.*-/, "").slice(0, 8);
  return index ? `${short}·${index}` : short;
}

// what a status tells against the one before: admission, preemption, return, end
function batchNews(status) {
  const news = [], states = new Map(status.rows.map((row) => [rowKey(row), row]));
  const first = batch.status === null;
  for (const [key, row] of states) {
    const old = batch.states.get(key)?.state;
    if (old === row.state || first) continue;
    const word = row.state === "running" ? (old === "preempted" ? "resumed" : "admitted") : row.state === "preempted" ? "preempted" : "waits";
    news.push({ word, name: rowName(row), step: status.step, key });
  }
  for (const [key, row] of batch.states) {
    if (!states.has(key)) news.push({ word: "left", name: rowName(row), step: status.step, key });
  }
  batch.states = states;
  return news;
}

function takeStatus(status) {
  const news = batchNews(status);
  batch.status = status;
  batch.log = [...news.reverse(), ...batch.log].slice(0, MOST_NEWS);
  batch.flash = new Map(news.map(({ key, word }) => [key, word]));
  if (!batch.frame) batch.frame = requestAnimationFrame(drawBatch);
}

function drawBatch() {
  batch.frame = 0;
  const { status } = batch;
  byId("batch").hidden = !status;
  if (!status) return;
  const { rows, budget, bytes: used, prefix_bytes: aside = 0, counters = {} } = status;
  // a budget that is nearly empty is shown enlarged
  let scale = Math.max(1, budget);
  while (used && used < scale / 10) scale /= 4;
  const running = rows.filter(({ state }) => state === "running").length;
  byId("batch-note").textContent = batch.connected ? `${running} running, ${rows.length - running} waiting` : "not connected";
  const parts = rows.filter((row) => row.bytes > 0).map((row) => {
    const part = make("span", { class: `part ${row.state}${rowName(row).startsWith("this") ? " own" : ""}`, title: `${rowName(row)}: ${bytes(row.bytes)}` });
    part.style.width = `${(100 * row.bytes) / scale}%`;
    return part;
  });
  byId("budget").replaceChildren(...parts);
  const words = `${bytes(used)} of ${bytes(budget)}${scale < budget ? ` (the bar: ${bytes(scale)})` : ""}`;
  byId("budget").setAttribute("aria-label", `Budget: ${words}`);
  byId("budget-note").textContent = [words, counters.admitted === undefined ? "" : `${count(counters.admitted)} admitted`, counters.preemptions === undefined ? "" : `${count(counters.preemptions)} preempted`, aside ? `${bytes(aside)} of prefixes` : ""].filter(Boolean).join(" · ");
  drawRows(rows);
  byId("batch-log").replaceChildren(...batch.log.map(({ word, name, step }) => make("li", { class: word }, make("span", { class: "word" }, word), ` ${name} `, make("span", { class: "quiet" }, `step ${count(step)}`))));
}

// by row: the tokens it has, of them read, of them held on average
function drawRows(rows) {
  const most = Math.max(1, ...rows.map(({ tokens }) => tokens));
  const list = rows.slice(0, MOST_ROWS).map((row) => {
    const track = make("span", { class: "track" });
    for (const [name, value] of [["all", row.tokens], ["read", row.read], ["fill", row.kept]]) {
      const fill = make("span", { class: name });
      fill.style.width = `${(100 * value) / most}%`;
      track.append(fill);
    }
    const name = rowName(row), flash = batch.flash?.get(rowKey(row));
    const words = row.state === "running" ? bytes(row.bytes) : STATES[row.state];
    const title = `${name}: ${plural(row.tokens, "token")}, ${count(row.read)} read, ${row.kept.toFixed(1)} held by a layer on average, ${bytes(row.bytes)}`;
    return make("div", { class: `row ${row.state}${name.startsWith("this") ? " own" : ""}${flash ? ` flash ${flash}` : ""}`, title, "data-request": row.request, "data-state": row.state, "data-bytes": row.bytes }, make("span", { class: "name" }, name), track, make("span", { class: "value" }, words));
  });
  if (rows.length > MOST_ROWS) list.push(make("p", { class: "quiet" }, `and ${plural(rows.length - MOST_ROWS, "row")} more`));
  byId("rows").replaceChildren(...list);
}

// while the page can be seen; a lost connection is tried again, ever more rarely
let watching = null;
async function watchBatch() {
  let wait = 1000;
  while (!document.hidden) {
    watching = new AbortController();
    let taken = false;
    try {
      const answer = await call("v1/kv", { signal: watching.signal });
      batch.connected = true;
      for await (const data of eventsOf(answer)) {
        wait = 1000;
        taken = true;
        takeStatus(JSON.parse(data));
      }
      // one of several replicas ends its view now and then: another is asked at once
      if (taken) continue;
    } catch (error) {
      // a server without a live view, or a key that is not set yet
      if (error.name === "AbortError" || error.status === 404) break;
    }
    batch.connected = false;
    if (batch.status) drawBatch();
    await new Promise((done) => setTimeout(done, wait));
    wait = Math.min(30000, 2 * wait);
  }
  watching = null;
}

function listenBatch() {
  byId("batch").hidden = true;
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) watching?.abort();
    else if (!watching) watchBatch();
  });
}
