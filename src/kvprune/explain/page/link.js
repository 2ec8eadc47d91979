// The link: token, layer and time after the # of the address, read at the start and kept up to date.

function linkOf({ selected, layer, t, side }) {
  const parts = [];
  if (selected >= 0) parts.push(`token=${selected}`);
  parts.push(`layer=${layer === ALL ? "all" : DATA.layers[layer]}`, `time=${t}`);
  if (side) parts.push(`side=${side}`);
  return `#${parts.join("&")}`;
}

// what a link asks for; whatever is not in this page is left out
function readLink(hash) {
  const asked = new URLSearchParams(hash.replace(/^#/, "")), values = {};
  const number = (name, most) => {
    const words = asked.get(name) ?? "";
    return /^\d{1,9}$/.test(words) && Number(words) < most ? Number(words) : undefined;
  };
  const token = number("token", T), t = number("time", T), side = number("side", RECORDS.length);
  const layer = asked.get("layer") === "all" ? ALL : DATA.layers.findIndex((name) => `${name}` === asked.get("layer"));
  if (token !== undefined) values.selected = token;
  if (t !== undefined) values.t = t;
  if (side !== undefined) values.side = side;
  if (layer >= 0) values.layer = layer;
  return values;
}

// browsers limit how often an address may change
let linkTimer = 0;
function updateLink() {
  clearTimeout(linkTimer);
  linkTimer = setTimeout(() => {
    if (linkOf(view) !== location.hash) history.replaceState(null, "", linkOf(view));
  }, 200);
}

async function copyLink() {
  const address = `${location.href.split("#")[0]}${linkOf(view)}`;
  const say = (words) => {
    byId("copied").textContent = words;
    setTimeout(() => { byId("copied").textContent = ""; }, 2500);
  };
  try {
    await navigator.clipboard.writeText(address);
    say("Link copied");
  } catch {
    // without permission the address bar still has it
    history.replaceState(null, "", linkOf(view));
    say("Not allowed to copy: the link is in the address bar");
  }
}

function listenLink() {
  byId("copy-link").addEventListener("click", copyLink);
  window.addEventListener("hashchange", () => {
    const values = readLink(location.hash);
    change(values);
    if (values.selected !== undefined) reveal(values.selected);
  });
}

listeners.push((changed) => {
  // opening the page is no move
  const open = document.documentElement.dataset.ready;
  if (open && !view.playing && ["selected", "layer", "t", "side", "playing"].some(changed)) updateLink();
});
