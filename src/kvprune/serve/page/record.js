// The record of one request: its tokens, who dropped whom in which layer, bytes over time.

const ALL = -1;

class Record {
  constructor() {
    this.tokens = [];
    this.prompt = 0;
    this.layers = 0;
    // by layer: the token that was read when a token was dropped, and the one that is to blame
    this.drop = [];
    this.by = [];
    // by token: the layers that have dropped it
    this.gone = [];
    // after a step: tokens read, tokens held by layer, bytes held, bytes of a dense cache
    this.samples = [];
    this.changed = new Set();
  }

  // the `kvprune` object of a chunk; true if there are new tokens
  take({ prompt_tokens, tokens, layers, drops }) {
    const before = this.tokens.length;
    if (layers) this.grow(layers);
    if (prompt_tokens && before === 0) {
      this.tokens.push(...prompt_tokens);
      this.prompt = prompt_tokens.length;
    }
    if (tokens) this.tokens.push(...tokens);
    if (drops) this.takeDrops(drops);
    return this.tokens.length > before;
  }

  grow(layers) {
    while (this.drop.length < layers) {
      this.drop.push([]);
      this.by.push([]);
    }
    this.layers = this.drop.length;
  }

  takeDrops({ step, dropped, kept, bytes, dense_bytes }) {
    this.grow(kept.length);
    for (const [layer, pairs] of dropped) {
      this.grow(layer + 1);
      for (const [token, dropper] of pairs) {
        if (this.drop[layer][token] !== undefined) continue;
        const known = dropper > token && dropper < step;
        this.drop[layer][token] = known ? dropper : step - 1;
        this.by[layer][token] = known ? dropper : -1;
        this.gone[token] = (this.gone[token] ?? 0) + 1;
        this.changed.add(token);
      }
    }
    this.samples.push({ step, kept, held: bytes, dense: dense_bytes });
  }

  get last() {
    return Math.max(0, this.tokens.length - 1);
  }

  // tokens read at time t: the newest token of an answer is not read until the next step
  readAt(t) {
    return Math.min(t + 1, this.samples.at(-1)?.step ?? t + 1);
  }

  // the share of layers, or one of them, that hold token i when token t has been read
  share(i, t, layer) {
    if (layer !== ALL) return this.drop[layer]?.[i] <= t ? 0 : 1;
    if (this.layers === 0) return 1;
    if (t >= this.last) return 1 - (this.gone[i] ?? 0) / this.layers;
    let held = 0;
    for (const drop of this.drop) held += drop[i] <= t ? 0 : 1;
    return held / this.layers;
  }

  // tokens that each layer holds when token t has been read
  held(t) {
    const newest = this.samples.at(-1);
    if (newest && t + 1 >= newest.step) return newest.kept;
    return this.drop.map((drop) => {
      let held = t + 1;
      for (let i = 0; i <= t; i++) if (drop[i] <= t) held--;
      return held;
    });
  }

  // bytes when token t has been read; between two reports from the tokens held: `about`
  bytesAt(t) {
    const sample = this.samples.find(({ step }) => step >= t + 1) ?? this.samples.at(-1);
    if (!sample) return null;
    if (sample.step <= t + 1) return { ...sample, about: false };
    const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
    const share = sum(this.held(t)) / Math.max(1, sum(sample.kept));
    return { held: sample.held * share, dense: (sample.dense * (t + 1)) / sample.step, about: true };
  }

  // the layers that have dropped token i by time t, by dropper: [[dropper, layers], …], most first
  droppersOf(i, t) {
    const found = new Map();
    this.drop.forEach((drop, l) => {
      if (!(drop[i] <= t)) return;
      const dropper = this.by[l][i];
      found.set(dropper, [...(found.get(dropper) ?? []), l]);
    });
    return [...found].sort((a, b) => b[1].length - a[1].length || a[0] - b[0]);
  }

  droppedBy(i, layer) {
    const found = new Set();
    this.by.forEach((by, l) => {
      if (layer !== ALL && l !== layer) return;
      by.forEach((dropper, token) => { if (dropper === i) found.add(token); });
    });
    return [...found].sort((a, b) => a - b);
  }

  save() {
    const drops = this.drop.map((drop, l) => drop.flatMap((time, token) => [[token, time, this.by[l][token]]]));
    return { tokens: this.tokens, prompt: this.prompt, layers: this.layers, drops, samples: this.samples };
  }

  static load({ tokens, prompt, layers, drops, samples }) {
    const record = new Record();
    record.tokens = tokens.map(({ id, text }) => ({ id, text: String(text) }));
    record.prompt = prompt;
    record.grow(layers);
    drops.forEach((list, l) => list.forEach(([token, time, by]) => {
      record.drop[l][token] = time;
      record.by[l][token] = by;
      record.gone[token] = (record.gone[token] ?? 0) + 1;
    }));
    record.samples = samples;
    return record;
  }
}
