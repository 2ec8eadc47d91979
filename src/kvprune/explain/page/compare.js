// Two records of the same text: which one the lower parts show, their differences, a table of both.

// kept here and not in the other: in one layer at this time, or in a quarter more of all layers
function keptMore(i, here, there) {
  const { t, layer } = view;
  if (i > t) return false;
  if (layer !== ALL) return here.drop[layer][i] > t && there.drop[layer][i] <= t;
  return here.aliveLayers(i, t) - there.aliveLayers(i, t) >= L / 4;
}

function paintDifference(i) {
  const [a, b] = panes;
  a.spans[i].classList.toggle("only-here", keptMore(i, a.record, b.record));
  b.spans[i].classList.toggle("only-here", keptMore(i, b.record, a.record));
  a.spans[i].classList.toggle("only-there", keptMore(i, b.record, a.record));
  b.spans[i].classList.toggle("only-there", keptMore(i, a.record, b.record));
}

// of all tokens read and chosen layers, the share that one keeps and the other dropped
function differing(layer, t) {
  const [a, b] = RECORDS;
  let different = 0;
  for (const l of layersOf(layer)) for (let j = 0; j <= t; j++) if (a.drop[l][j] > t !== b.drop[l][j] > t) different++;
  return different / (layersOf(layer).length * (t + 1));
}

function settings({ about }) {
  return Object.entries({ method: about.method, ...about.settings }).filter(([, value]) => value !== false && value !== "");
}

function settingsOf(record) {
  return settings(record).map(([name, value]) => (name === "method" ? value : `${name} ${value}`)).join(", ");
}

const SAME = (name) => RECORDS.every((r) => settings(r).find(([n]) => n === name)?.[1] === settings(RECORDS[0]).find(([n]) => n === name)?.[1]);

function sharedSettings() {
  return settings(RECORDS[0]).filter(([name]) => SAME(name)).map(([name, value]) => (name === "method" ? value : `${name} ${value}`)).join(", ");
}

function tableRows() {
  const names = new Set(RECORDS.flatMap((r) => settings(r).map(([name]) => name)));
  const rows = [
    ...[...names].filter((name) => !SAME(name)).map((name) => [name, (r) => settings(r).find(([n]) => n === name)?.[1] ?? "–"]),
    ["of the earlier tokens dropped at the end", (r) => percent(r.sparsityAt(ALL, T - 1))],
    ["dropped over all pairs", (r) => percent(r.sparsityOverall(ALL))],
    ["cache at the end", (r) => `${bytes(r.cacheBytes(T - 1).kept)} of ${bytes(r.cacheBytes(T - 1).dense)} dense`],
  ];
  if (HAS_COST) {
    rows.push(["mean loss", (r) => (r.loss ? decimal(meanLoss(r.loss), 3) : "not measured")]);
    rows.push(["mean loss, dense", (r) => (r.dense_loss ? decimal(meanLoss(r.dense_loss), 3) : "not measured")]);
  }
  return rows;
}

function buildCompare() {
  byId("compare").hidden = !COMPARES;
  byId("sides").hidden = !COMPARES;
  document.body.classList.toggle("compares", COMPARES);
  if (!COMPARES) return;
  const head = make("tr", {}, make("th", {}), ...RECORDS.map(({ name }) => make("th", { scope: "col" }, name)));
  const rows = tableRows().map(([name, value]) => make("tr", {}, make("th", { scope: "row" }, name), ...RECORDS.map((r) => make("td", {}, value(r)))));
  byId("compare-table").append(head, ...rows);
  RECORDS.forEach(({ name }, side) => {
    const button = make("button", { type: "button", role: "radio", "aria-checked": side === 0, tabindex: side ? "-1" : "0" }, name);
    button.addEventListener("click", () => change({ side }));
    byId("sides").append(button);
  });
  byId("sides").addEventListener("keydown", (event) => {
    if (!event.key.startsWith("Arrow")) return;
    event.preventDefault();
    change({ side: 1 - view.side });
    byId("sides").children[view.side].focus();
  });
}

function drawDifference() {
  const where = view.layer === ALL ? `of all layers, ${percent(differing(ALL, view.t))}` : `in ${layerName(view.layer)}, ${percent(differing(view.layer, view.t))}`;
  byId("difference").textContent = `After token ${view.t}, ${where} of the tokens read are kept by one and dropped by the other. Marked in the text: ${view.layer === ALL ? "kept in at least a quarter more of the layers" : "kept"} here (dotted orange), or there (dotted grey).`;
}

listeners.push((changed) => {
  if (!COMPARES) return;
  if (changed("side")) {
    [...byId("sides").children].forEach((button, side) => {
      button.setAttribute("aria-checked", side === view.side);
      button.tabIndex = side === view.side ? 0 : -1;
    });
    for (const { pane, side } of panes) pane.classList.toggle("shown", side === view.side);
  }
  if (changed("layer") || changed("t")) drawDifference();
});
