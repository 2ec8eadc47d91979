// The panel of the token in focus: what became of it, and why.

// one bar per layer: from where the token is read to where it is dropped
function lifeBars(record, i) {
  const svg = makeSvg("svg", { class: "life", viewBox: `0 0 ${T} ${L * 4}`, preserveAspectRatio: "none", role: "img", "aria-label": "Its lifetime in each layer" });
  for (let l = 0; l < L; l++) {
    const end = Math.min(record.drop[l][i], T);
    svg.append(makeSvg("rect", { x: 0, y: l * 4 + 0.5, width: T, height: 3, class: "room" }));
    svg.append(makeSvg("rect", { x: i, y: l * 4 + 0.5, width: Math.max(end - i, T / 200), height: 3, class: record.drop[l][i] < T ? "lived" : "lives" }));
  }
  svg.append(makeSvg("line", { x1: view.t + 0.5, x2: view.t + 0.5, y1: 0, y2: L * 4, class: "cursor" }));
  return svg;
}

function fate(record, i) {
  const line = make("p", { class: "fate" }), { layer } = view, name = layerName(layer);
  const step = record.drop[layer][i];
  if (step < T) {
    const later = step - i === 1 ? "the next token" : `${step - i} tokens later`;
    line.append(`Dropped in ${name} by `, tokenButton(step), ` (token ${step}, ${later}).`);
  } else line.append(`${name[0].toUpperCase()}${name.slice(1)} keeps it to the end.`);
  return line;
}

// the score of its drop, and who would have dropped it later
function reasons({ votes, drop }, i) {
  const { layer } = view, { threshold } = votes, step = drop[layer][i];
  if (i < votes.first) return [make("p", { class: "reason" }, `It is one of the first ${votes.first} tokens, which are protected.`)];
  if (step >= T) return [make("p", { class: "reason" }, `No score on it was as low as the threshold, ${brief(threshold)}.`)];
  const score = votes.score[layer][i], margin = threshold - score;
  const how = margin >= 0
    ? `Score ${decimal(score)}: ${decimal(margin)} below the threshold, ${brief(threshold)}.`
    : `Score ${decimal(score)}, above the threshold, ${brief(threshold)}: a layer below dropped it.`;
  const others = make("p", { class: "runners" });
  const runners = votes.runners(layer, i);
  if (!runners.length) others.append("No later token would have dropped it.");
  else {
    others.append(`Otherwise it would have been dropped by `);
    runners.forEach(({ step: runner, score: low }, n) => {
      others.append(n ? ", " : "", tokenButton(runner), ` (${runner - i} later, ${decimal(low)})`);
    });
    others.append(".");
  }
  return [make("p", { class: "reason" }, how), others];
}

// every layer's drop in a table; it stays open from token to token
let tableOpen = false;
function byLayer(record, i) {
  const rows = record.drop.map((drop, l) => {
    const choose = make("button", { type: "button", "aria-label": `Choose layer ${DATA.layers[l]}` }, DATA.layers[l]);
    choose.addEventListener("click", () => change({ layer: l }));
    const step = drop[i];
    const cells = step < T ? [shown(step), `${step - i} later`, ...(record.votes ? [decimal(record.votes.score[l][i])] : [])] : ["stays", "", ""];
    return make("tr", {}, make("td", {}, choose), ...cells.map((words) => make("td", {}, words)));
  });
  const details = make("details", { class: "by-layer" }, make("summary", {}, record.votes ? "By layer: dropper, distance, score" : "By layer: dropper, distance"), make("table", {}, ...rows));
  details.open = tableOpen;
  details.addEventListener("toggle", () => { tableOpen = details.open; });
  return details;
}

function keepersLine(record, i) {
  const keepers = record.drop.flatMap((drop, l) => (drop[i] >= T ? [DATA.layers[l]] : []));
  const sentence = keepers.length === 0 ? "No layer keeps it to the end."
    : keepers.length === L ? "Every layer keeps it to the end."
    : `Kept to the end in ${keepers.length === 1 ? "layer" : "layers"} ${keepers.join(", ")}.`;
  return make("p", { class: "lives" }, sentence);
}

function lossLine(record, i) {
  if (!record.loss || Number.isNaN(record.loss[i])) return [];
  const place = record.misses.findIndex(({ token }) => token === i);
  // the strip is rounded more than the list of the worst: one token, one number
  const loss = record.misses[place]?.loss ?? record.loss[i], dense = record.misses[place]?.dense_loss ?? record.dense_loss?.[i];
  const cost = dense === undefined ? "" : `, dense ${decimal(dense)} (${decimal(loss - dense, 2, true)})`;
  const line = make("p", { class: "loss" }, `Its own prediction: loss ${decimal(loss)}${cost}.`);
  if (place >= 0) {
    const button = make("button", { type: "button", class: "to-miss" }, "what it lacked");
    button.addEventListener("click", () => showMiss(RECORDS.indexOf(record), place));
    line.append(" ", button);
  }
  return [line];
}

function droppedList(record, i) {
  const { dropped } = relations(record, i);
  const list = make("p", { class: "dropped-list" });
  if (dropped.size === 0) list.append("It dropped nothing", view.layer === ALL ? " in any layer." : " here.");
  else {
    list.append(`It dropped ${plural(dropped.size, "token")}: `);
    const most = 40;
    for (const j of [...dropped.keys()].sort((a, b) => a - b).slice(0, most)) list.append(tokenButton(j), " ");
    if (dropped.size > most) list.append(`and ${dropped.size - most} more`);
  }
  return list;
}

function drawDetail() {
  const body = byId("detail-body"), i = subject();
  byId("detail").classList.toggle("empty", i < 0);
  if (i < 0) {
    body.replaceChildren(make("p", { class: "quiet" }, "Point at a token, or move with the arrow keys, to see when it was dropped, by which token and why, and which layers keep it. Click or press enter to select it."));
    return;
  }
  const parts = [make("p", { class: "big", dir: "auto" }, shown(i))];
  const origin = i >= DATA.prompt ? "generated" : "prompt";
  const labels = new Set([DATA.kinds[DATA.kind[i]], DATA.speeches[DATA.speech[i]]]);
  labels.delete(undefined);
  parts.push(make("p", { class: "quiet" }, [`token ${i}`, origin, ...labels].join(", ")));
  for (const record of RECORDS) {
    const own = make("div", { class: "of-record" });
    if (COMPARES) own.append(make("h3", {}, record.name));
    if (view.layer !== ALL) own.append(fate(record, i), ...(record.votes ? reasons(record, i) : []));
    own.append(keepersLine(record, i), ...lossLine(record, i), lifeBars(record, i));
    if (view.layer === ALL) own.append(byLayer(record, i));
    parts.push(own);
  }
  parts.push(droppedList(current(), i));
  body.replaceChildren(...parts);
}

function listenDetail() {
  byId("detail-close").addEventListener("click", () => change({ selected: -1, focus: -1, miss: -1, back: -1 }));
}

listeners.push((changed) => {
  if (["subject", "layer", "side"].some(changed) || (changed("t") && subject() >= 0)) drawDetail();
});
