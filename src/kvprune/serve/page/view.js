// The view: the state of the page. Parts subscribe to changes, which are drawn once per frame.

// t: the token that has been read, Infinity for the newest; subject: [side, token] in focus
const view = { t: Infinity, layer: ALL, subject: null, playing: false, fade: remembered("fade", true), raw: false, news: 0 };
const listeners = [];
let before = null;

function change(values) {
  if (!before) {
    before = { ...view };
    requestAnimationFrame(flush);
  }
  Object.assign(view, values);
}

function flush() {
  const old = before;
  before = null;
  const changed = (...names) => names.some((name) => old[name] !== view[name]);
  for (const listener of listeners) listener(changed, old);
}

// the records on screen, the pruned one first, then the one with nothing dropped
const stage = { records: [] };

function current() {
  return stage.records[0];
}

function setStage(records) {
  stage.records = records;
  change({ t: Infinity, subject: null, playing: false, layer: view.layer < (records[0]?.layers || Infinity) ? view.layer : ALL, news: view.news + 1 });
}

function layerName(layer) {
  return layer === ALL ? "all layers" : `layer ${layer}`;
}
