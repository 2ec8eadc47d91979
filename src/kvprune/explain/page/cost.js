// What it cost: the loss of each token as a strip under the text, and the tokens that suffered most.

const STRIPS = {
  added: "loss that pruning added",
  loss: "loss, pruned",
  dense: "loss, dense",
  none: "nothing",
};
const HIGHEST = 9; // pixels of the tallest bar under a token
const HAS_COST = RECORDS.some(({ loss, dense_loss: dense }) => loss && dense);

// the value of the strip at token i, NaN where there is none
function stripValue(record, i) {
  const { loss, dense_loss: dense } = record;
  if (view.strip === "added") return loss && dense ? loss[i] - dense[i] : NaN;
  if (view.strip === "loss") return loss ? loss[i] : NaN;
  return view.strip === "dense" && dense ? dense[i] : NaN;
}

function drawStrip({ record, spans, host }) {
  host.classList.toggle("with-strip", view.strip !== "none");
  host.dataset.strip = view.strip;
  // a difference of 3 or a loss of 12 fills the room
  const full = view.strip === "added" ? 3 : 12;
  for (let i = 0; i < T; i++) {
    const value = stripValue(record, i), span = spans[i];
    const height = Number.isNaN(value) ? 0 : Math.min(HIGHEST, (HIGHEST * Math.abs(value)) / full);
    // a difference of a third, which tokens have by chance, is not worth a line
    span.style.setProperty("--bar", height < 1 ? "0px" : `${height.toFixed(1)}px`);
    span.classList.toggle("better", view.strip === "added" && value < 0);
  }
}

function costSummary(record) {
  const dense = meanLoss(record.dense_loss), loss = meanLoss(record.loss);
  const which = { "base model": "the base model without pruning", "open gates": "the same model with every gate open" }[record.about.dense] || "the dense model";
  const open = record.open_loss ? ` (${decimal(meanLoss(record.open_loss), 3)} with every gate open)` : "";
  return `mean loss ${decimal(loss, 3)} pruned, ${decimal(dense, 3)} dense${open}: ${decimal(loss - dense, 3, true)} per token. Dense is ${which}.`;
}

// bars over the text: what pruning added, by position
function drawCostChart(host, record) {
  const width = host.clientWidth, height = 96, middle = 52;
  if (!width) return;
  const canvas = make("canvas", { class: "cost-bars", role: "img", "aria-label": "What pruning added to the loss of each token, by position" });
  const context = fitted(canvas, width, height);
  const { warm, accent, line, quiet } = colours();
  let most = 1, least = -1;
  for (let i = 1; i < T; i++) {
    const value = record.loss[i] - record.dense_loss[i];
    [most, least] = [Math.max(most, value || 0), Math.min(least, value || 0)];
  }
  const x = (i) => (width * i) / T, scale = Math.min((middle - 4) / most, (height - middle - 2) / -least);
  context.strokeStyle = line;
  context.strokeRect(0, middle + 0.5, width, 0);
  for (let i = 1; i < T; i++) {
    const value = record.loss[i] - record.dense_loss[i];
    if (Number.isNaN(value)) continue;
    context.fillStyle = value > 0 ? warm : accent;
    const tall = Math.abs(value) * scale;
    context.fillRect(x(i), value > 0 ? middle - tall : middle, Math.max(1, width / T - 0.5), tall);
  }
  context.fillStyle = quiet;
  context.font = "11px system-ui, sans-serif";
  context.fillText(`up to +${most.toFixed(1)}`, 2, 11);
  context.fillText(`down to ${decimal(least, 1)}`, 2, height - 2);
  host.replaceChildren(canvas, make("span", { class: "cost-cursor" }));
  const at = (event) => Math.max(0, Math.min(T - 1, Math.floor((event.offsetX / width) * T)));
  canvas.addEventListener("click", (event) => select(at(event)));
}

function moveCostCursor() {
  const i = subject() >= 0 ? subject() : view.t;
  for (const cursor of document.querySelectorAll(".cost-cursor")) cursor.style.left = `${(100 * i) / T}%`;
}

function showMiss(side, place) {
  change({ side, miss: place, back: -1, selected: RECORDS[side].misses[place].token, focus: -1 });
}

function drawMisses() {
  const record = current(), list = byId("misses");
  list.replaceChildren(...record.misses.map((miss, place) => {
    const button = make("button", { type: "button", class: "miss", "aria-pressed": place === view.miss },
      make("span", { class: "name", dir: "auto" }, inWord(miss.token)),
      make("span", { class: "value" }, `${decimal(miss.dense_loss)} → ${decimal(miss.loss)}`),
      make("span", { class: "quiet" }, `token ${miss.token}${miss.returns ? "" : ", not tried"}`));
    button.addEventListener("click", () => (view.miss === place ? change({ miss: -1, back: -1 }) : showMiss(view.side, place)));
    return make("li", {}, button);
  }));
  byId("misses-note").textContent = record.misses.length
    ? "The tokens whose prediction suffered most: loss dense → pruned. Choose one to see which dropped tokens it lacked."
    : "This trace has no list of the worst tokens.";
}

const PLACE = (layer) => (layer === null ? "every layer" : layerName(layer));

// the chosen token: its loss dense, pruned, and with each of the tokens brought back
function drawReturns() {
  const host = byId("returns"), miss = current().misses[view.miss];
  host.hidden = !miss;
  if (!miss) return;
  const tried = miss.returns || [];
  const most = Math.max(miss.loss, miss.dense_loss, miss.open_loss ?? 0, ...tried.map(([, , loss]) => loss));
  const bar = (name, loss, kind) => {
    const fill = make("span", { class: `fill ${kind}` });
    fill.style.width = `${(100 * loss) / most}%`;
    return [make("span", { class: "name" }, name), make("span", { class: "track" }, fill), make("span", { class: "value" }, decimal(loss))];
  };
  const returns = tried.map(([token, layer, loss], n) => {
    const button = make("button", { type: "button", class: "row return", "aria-pressed": n === view.back, "data-token": token },
      ...bar(`${inWord(token)} (${token}) back in ${PLACE(layer)}`, loss, loss < miss.loss ? "back" : "worse"));
    button.addEventListener("click", () => bringBack(n));
    return button;
  });
  const told = tried[view.back];
  const sentence = !told ? "Bring a dropped token back to see where it stands and what it does for this prediction."
    : `With ${inWord(told[0])} (token ${told[0]}) back in ${PLACE(told[1])}, the loss of ${shown(miss.token)} goes from ${decimal(miss.loss)} to ${decimal(told[2])}; dense it is ${decimal(miss.dense_loss)}.`;
  host.replaceChildren(
    make("h3", {}, `What ${inWord(miss.token)} (token ${miss.token}) lacked`),
    make("div", { class: "row" }, ...bar("dense", miss.dense_loss, "stays")),
    make("div", { class: "row" }, ...bar("pruned", miss.loss, "worse")),
    ...returns,
    ...(miss.open_loss === null ? [] : [make("div", { class: "row" }, ...bar("every token back", miss.open_loss, "back"))]),
    make("p", { class: "quiet", id: "back-note", "aria-live": "polite" }, tried.length ? sentence : miss.returns ? "No dropped token was worth a try." : "Dropped tokens were not brought back for this one; kvprune explain --misses 12 tries them for more tokens."),
  );
}

function bringBack(n) {
  if (view.back === n) return change({ back: -1 });
  const [token, layer] = current().misses[view.miss].returns[n];
  change({ back: n, ...(layer === null ? {} : { layer }) });
  reveal(token);
}

// the marks of the chosen token and of those it lacked, in the pane of their record
function missMarks({ side, record }) {
  const miss = side === view.side ? record.misses[view.miss] : undefined;
  if (!miss) return [];
  // dashed around those it lacked, filled for the one that is back
  const marks = (miss.returns || []).map(([token]) => [token, "lacked"]);
  if (miss.returns?.[view.back]) marks.push([miss.returns[view.back][0], "returned"]);
  return [...marks, [miss.token, "missed"]];
}

function drawCost() {
  const body = byId("cost-summary");
  body.replaceChildren();
  for (const record of RECORDS) {
    if (COMPARES) body.append(make("h3", {}, record.name));
    if (!record.loss || !record.dense_loss) {
      body.append(make("p", { class: "quiet no-loss" }, "The losses were not measured for this page; kvprune explain --cost measures them."));
      continue;
    }
    const chart = make("div", { class: "cost-chart" });
    body.append(make("p", { class: "quiet" }, costSummary(record)), chart);
    drawCostChart(chart, record);
  }
  moveCostCursor();
}

function buildCost() {
  const strip = byId("strip");
  byId("cost-list").hidden = byId("strip-label").hidden = !HAS_COST;
  for (const [name, words] of Object.entries(STRIPS)) strip.append(make("option", { value: name }, words));
  strip.addEventListener("change", () => change({ strip: strip.value }));
  if (HAS_COST) view.strip = "added";
}

listeners.push((changed) => {
  if (changed("strip")) {
    byId("strip").value = view.strip;
    panes.forEach(drawStrip);
    // lines have another height now
    panes.forEach(paintSubject);
  }
  if (changed("side")) drawMisses();
  else if (changed("miss")) for (const [n, { firstChild }] of [...byId("misses").children].entries()) firstChild.setAttribute("aria-pressed", n === view.miss);
  if (changed("side") || changed("miss") || changed("back")) drawReturns();
  if (["subject", "t"].some(changed)) moveCostCursor();
});
