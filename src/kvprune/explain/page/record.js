// The record: the trace as typed arrays, and all numbers that the page shows. No drawing.

const DATA = JSON.parse(document.getElementById("data").textContent);
const T = DATA.tokens.length;
const L = DATA.layers.length;
const ALL = L; // the last layer button: all layers at once
const NEVER = 2147483647;

// one row per layer; the step of a token that stays is later than any other
const DROP = DATA.drop_step.map((row) => Int32Array.from(row, (step) => (step < 0 ? NEVER : step)));

// tokens by the step that drops them: those of step i are dropped[from[i]] .. dropped[from[i + 1] - 1]
function byStep(drop) {
  const from = new Int32Array(T + 1);
  for (const step of drop) if (step < T) from[step + 1]++;
  for (let i = 0; i < T; i++) from[i + 1] += from[i];
  const next = from.slice();
  const dropped = new Int32Array(from[T]);
  for (let j = 0; j < T; j++) if (drop[j] < T) dropped[next[drop[j]]++] = j;
  return { from, dropped };
}
const EVENTS = DROP.map(byStep);

function droppedBy(layer, i) {
  const { from, dropped } = EVENTS[layer];
  return Array.from(dropped.subarray(from[i], from[i + 1]));
}

// the number of tokens that a layer holds after token k, including k
const KEPT = EVENTS.map(({ from }) => Int32Array.from({ length: T }, (_, k) => k + 1 - from[k + 1]));

function layersOf(layer) {
  return layer === ALL ? DROP.map((_, l) => l) : [layer];
}

function layerName(layer) {
  return layer === ALL ? "all layers" : `layer ${DATA.layers[layer]}`;
}

// the share of the k earlier tokens that token k cannot see
function sparsityAt(layer, k) {
  if (k === 0) return 0;
  const chosen = layersOf(layer);
  let gone = 0;
  for (const l of chosen) gone += k + 1 - KEPT[l][k];
  return gone / (k * chosen.length);
}

// the same over all pairs of a token and an earlier one
function sparsityOverall(layer) {
  const chosen = layersOf(layer);
  let gone = 0;
  for (const l of chosen) for (let k = 1; k < T; k++) gone += k + 1 - KEPT[l][k];
  return T > 1 ? gone / (chosen.length * T * (T - 1) / 2) : 0;
}

function cacheBytes(k) {
  let held = 0;
  for (const kept of KEPT) held += kept[k];
  return { kept: held * DATA.kept_bytes, dense: L * (k + 1) * DATA.dense_bytes };
}

function aliveLayers(j, t) {
  let alive = 0;
  for (const drop of DROP) if (drop[j] > t) alive++;
  return alive;
}

// share of drops by kind of the dropper, and how common that kind is
function droppersByKind(layer) {
  const drops = new Float64Array(DATA.kinds.length);
  const tokens = new Float64Array(DATA.kinds.length);
  let total = 0;
  for (const l of layersOf(layer)) {
    for (const step of DROP[l]) if (step < T) { drops[DATA.kind[step]]++; total++; }
  }
  for (const kind of DATA.kind) tokens[kind]++;
  return DATA.kinds.map((name, i) => ({
    name, share: total ? drops[i] / total : 0, expected: tokens[i] / T, count: drops[i],
  }));
}

function topDroppers(layer, most) {
  const counts = new Map();
  let total = 0;
  for (const l of layersOf(layer)) {
    for (const step of DROP[l]) {
      if (step >= T) continue;
      counts.set(DATA.tokens[step], (counts.get(DATA.tokens[step]) || 0) + 1);
      total++;
    }
  }
  return Array.from(counts, ([token, count]) => ({ token, count, share: count / total }))
    .sort((a, b) => b.count - a.count)
    .slice(0, most);
}

// by part of speech (or kind, without a tagger): the share of later tokens that still see a token
function keptByPart(layer) {
  const tagged = DATA.speech.length > 0;
  const names = tagged ? DATA.speeches : DATA.kinds;
  const part = tagged ? DATA.speech : DATA.kind;
  const seen = new Float64Array(names.length);
  const pairs = new Float64Array(names.length);
  for (const l of layersOf(layer)) {
    for (let j = 0; j < T - 1; j++) {
      seen[part[j]] += Math.min(DROP[l][j], T) - 1 - j;
      pairs[part[j]] += T - 1 - j;
    }
  }
  return names.map((name, i) => ({ name, share: seen[i] / pairs[i], pairs: pairs[i] }))
    .filter((row) => row.pairs > 0)
    .sort((a, b) => b.share - a.share);
}

// how many were dropped 1, 2-3, 4-7, ... tokens later, and how many stayed
function lifetimes(layer) {
  const bins = Array.from({ length: Math.floor(Math.log2(Math.max(T - 1, 1))) + 1 }, () => 0);
  let stayed = 0;
  for (const l of layersOf(layer)) {
    for (let j = 0; j < T; j++) {
      if (DROP[l][j] < T) bins[Math.floor(Math.log2(DROP[l][j] - j))]++;
      else stayed++;
    }
  }
  const total = T * layersOf(layer).length;
  const rows = bins.map((count, b) => {
    const first = 2 ** b, last = 2 ** (b + 1) - 1;
    return { name: first === last ? `${first}` : `${first}–${last}`, share: count / total, count };
  });
  return [...rows, { name: "stays", share: stayed / total, count: stayed, stays: true }];
}
