// What is remembered: settings and conversations in the browser, the key for this tab only.

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "threshold", "protect_recent"];
const OURS = ["threshold", "protect_recent"];

// a browser may refuse storage, for example in private windows: then nothing is remembered
function remembered(name, otherwise, storage = () => localStorage) {
  try {
    return JSON.parse(storage().getItem(`kvprune.${name}`)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function remember(name, value, storage = () => localStorage) {
  try {
    if (value === null) storage().removeItem(`kvprune.${name}`);
    else storage().setItem(`kvprune.${name}`, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

const settings = { system: "", max_tokens: 256, ...remembered("settings", {}) };
let key = remembered("key", "", () => sessionStorage);

function setSetting(name, value) {
  if (value === undefined) delete settings[name];
  else settings[name] = value;
  remember("settings", settings);
}

function setKey(value) {
  key = value;
  remember("key", value || null, () => sessionStorage);
}
