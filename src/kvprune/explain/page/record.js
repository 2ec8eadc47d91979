// The records: each trace as typed arrays, and what follows from them. No drawing.

const DATA = JSON.parse(document.getElementById("data").textContent);
const T = DATA.tokens.length;
const L = DATA.layers.length;
const ALL = L; // stands for all layers at once
const NEVER = 2147483647;
const RUNNERS = 3;

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

class Record {
  constructor(about, arrays) {
    this.about = about;
    this.name = about.name;
    // one row per layer; the step of a token that stays is later than any other
    this.drop = rows(arrays.drop, T).map((lives) => Int32Array.from(lives, (life, j) => (life ? j + life : NEVER)));
    this.events = this.drop.map(byStep);
    // the number of tokens that a layer holds after token k, including k
    this.kept = this.events.map(({ from }) => Int32Array.from({ length: T }, (_, k) => k + 1 - from[k + 1]));
    this.votes = arrays.score ? new Votes(this, arrays) : null;
    for (const name of ["loss", "dense_loss", "open_loss"]) this[name] = arrays[name] || null;
    this.misses = about.misses || [];
  }

  // the token up to t that dropped most, over all layers
  busiest(t) {
    let best = 0, most = 0;
    for (let i = 1; i <= t; i++) {
      const count = this.events.reduce((sum, { from }) => sum + from[i + 1] - from[i], 0);
      if (count > most) [best, most] = [i, count];
    }
    return best;
  }

  // the tokens that token i dropped
  droppedBy(layer, i) {
    const { from, dropped } = this.events[layer];
    return Array.from(dropped.subarray(from[i], from[i + 1]));
  }

  // the share of the k earlier tokens that token k cannot see
  sparsityAt(layer, k) {
    if (k === 0) return 0;
    const chosen = layersOf(layer);
    let gone = 0;
    for (const l of chosen) gone += k + 1 - this.kept[l][k];
    return gone / (k * chosen.length);
  }

  // the same over all pairs of a token and an earlier one
  sparsityOverall(layer) {
    const chosen = layersOf(layer);
    let gone = 0;
    for (const l of chosen) for (let k = 1; k < T; k++) gone += k + 1 - this.kept[l][k];
    return T > 1 ? gone / (chosen.length * T * (T - 1) / 2) : 0;
  }

  cacheBytes(k) {
    let held = 0;
    for (const kept of this.kept) held += kept[k];
    return { kept: held * this.about.kept_bytes, dense: L * (k + 1) * this.about.dense_bytes };
  }

  // the number of layers that hold token j after token t
  aliveLayers(j, t) {
    let alive = 0;
    for (const drop of this.drop) if (drop[j] > t) alive++;
    return alive;
  }

  setting(name) {
    return this.about[name] ?? this.about.settings[name];
  }
}

// why a token was dropped: the scores of later tokens on it
class Votes {
  constructor(record, arrays) {
    const { threshold, protect_first, protect_recent, scores } = record.about;
    Object.assign(this, { record, threshold, first: protect_first, recent: protect_recent });
    this.score = rows(arrays.score, T);
    this.gap = rows(arrays.runner_gap, T * RUNNERS);
    this.runnerScore = rows(arrays.runner_score, T * RUNNERS);
    this.error = scores ? { rms: scores.rms, largest: scores.largest } : null;
    if (!scores) return;
    this.beta = arrays.beta;
    this.weight = scores.weight;
    this.query = rows(arrays.query, T);
    this.key = rows(arrays.key, T);
    this.parts = Array.from({ length: L }, () => []);
    arrays.layer.forEach((layer, part) => this.parts[layer].push(part));
  }

  // the first later tokens that would have dropped j too: [{ step, score }]
  runners(layer, j) {
    const found = [];
    let step = this.record.drop[layer][j];
    for (let n = j * RUNNERS; n < (j + 1) * RUNNERS; n++) {
      if (!this.gap[layer][n]) break;
      step += this.gap[layer][n];
      found.push({ step, score: this.runnerScore[layer][n] });
    }
    return found;
  }

  // whether the vote of token i on j counts
  counts(i, j) {
    return j >= this.first && i - j > this.recent;
  }

  // the scores of all later tokens on j, NaN for the others; null if the page has none
  curve(layer, j) {
    if (!this.error) return null;
    const curve = new Float32Array(T).fill(NaN);
    for (let i = j + 1; i < T; i++) curve[i] = this.beta[layer];
    for (const part of this.parts[layer]) {
      const share = this.weight[part] * this.key[part][j];
      if (share === 0) continue;
      const query = this.query[part];
      for (let i = j + 1; i < T; i++) curve[i] += share * query[i];
    }
    return this.corrected(curve, layer, j);
  }

  // the curve is rounded, but what happened is known exactly: where no token dropped j, nor would
  // have, its score was above the threshold
  corrected(curve, layer, j) {
    const drop = this.record.drop[layer][j];
    const runners = this.runners(layer, j);
    const exact = new Map(runners.map(({ step, score }) => [step, score]));
    if (drop < T) exact.set(drop, this.score[layer][j]);
    const known = runners.length === RUNNERS ? runners[RUNNERS - 1].step : T;
    for (let i = j + 1; i < T; i++) {
      if (exact.has(i)) curve[i] = exact.get(i);
      else if (i < known && this.counts(i, j)) curve[i] = Math.max(curve[i], this.threshold + 0.01);
    }
    return curve;
  }
}

function layersOf(layer) {
  return layer === ALL ? DATA.layers.map((_, l) => l) : [layer];
}

function layerName(layer) {
  return layer === ALL ? "all layers" : `layer ${DATA.layers[layer]}`;
}

async function unpackRecord(about) {
  const plain = ["drop", "runner_gap"], numbers = ["score", "runner_score", "loss", "dense_loss", "open_loss"];
  const found = (names, from, open) => names.filter((name) => from[name]).map(async (name) => [name, await open(from[name])]);
  const scores = about.scores || {};
  return new Record(about, Object.fromEntries(await Promise.all([
    ...found(plain, about, unpack), ...found(numbers, about, unpackNumbers),
    ...found(["query", "key", "layer"], scores, unpack), ...found(["beta"], scores, unpackNumbers),
  ])));
}

const RECORDS = await Promise.all(DATA.records.map(unpackRecord));
const COMPARES = RECORDS.length > 1;
