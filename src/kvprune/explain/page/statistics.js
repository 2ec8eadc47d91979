// Counts over the drops of one record.

// share of drops by kind of the dropper, and how common that kind is
function droppersByKind(record, layer) {
  const drops = new Float64Array(DATA.kinds.length);
  const tokens = new Float64Array(DATA.kinds.length);
  let total = 0;
  for (const l of layersOf(layer)) {
    for (const step of record.drop[l]) if (step < T) { drops[DATA.kind[step]]++; total++; }
  }
  for (const kind of DATA.kind) tokens[kind]++;
  return DATA.kinds.map((name, i) => ({
    name, share: total ? drops[i] / total : 0, expected: tokens[i] / T, count: drops[i],
  }));
}

function topDroppers(record, layer, most) {
  const counts = new Map();
  let total = 0;
  for (const l of layersOf(layer)) {
    for (const step of record.drop[l]) {
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
function keptByPart(record, layer) {
  const tagged = DATA.speech.length > 0;
  const names = tagged ? DATA.speeches : DATA.kinds;
  const part = tagged ? DATA.speech : DATA.kind;
  const seen = new Float64Array(names.length);
  const pairs = new Float64Array(names.length);
  for (const l of layersOf(layer)) {
    for (let j = 0; j < T - 1; j++) {
      seen[part[j]] += Math.min(record.drop[l][j], T) - 1 - j;
      pairs[part[j]] += T - 1 - j;
    }
  }
  return names.map((name, i) => ({ name, share: seen[i] / pairs[i], pairs: pairs[i] }))
    .filter((row) => row.pairs > 0)
    .sort((a, b) => b.share - a.share);
}

// how many were dropped 1, 2-3, 4-7, ... tokens later, and how many stayed
function lifetimes(record, layer) {
  const bins = Array.from({ length: Math.floor(Math.log2(Math.max(T - 1, 1))) + 1 }, () => 0);
  let stayed = 0;
  for (const l of layersOf(layer)) {
    for (let j = 0; j < T; j++) {
      const step = record.drop[l][j];
      if (step < T) bins[Math.floor(Math.log2(step - j))]++;
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

// the share of the drops that came at the first distance at which a vote counts
function atFirstChance(record, layer) {
  const chance = (record.setting("protect_recent") || 0) + 1;
  let drops = 0, first = 0;
  for (const l of layersOf(layer)) {
    record.drop[l].forEach((step, j) => {
      if (step >= T) return;
      drops++;
      if (step - j === chance) first++;
    });
  }
  return { chance, share: drops ? first / drops : 0 };
}

function meanLoss(loss) {
  let sum = 0, count = 0;
  for (const value of loss) if (!Number.isNaN(value)) { sum += value; count++; }
  return count ? sum / count : NaN;
}
