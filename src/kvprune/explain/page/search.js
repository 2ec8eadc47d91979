// Search: tokens by their text, by kind, part of speech or fate.

const FATES = {
  "dropped in every layer": (i) => current().aliveLayers(i, T - 1) === 0,
  "kept in every layer": (i) => current().aliveLayers(i, T - 1) === L,
  "generated": (i) => i >= DATA.prompt,
};
const found = { tokens: [], place: -1 };
const WHOLE = DATA.tokens.join("").toLowerCase();
// where the text of each token starts; lower case may have another length, so it is counted there
const STARTS = (() => {
  const starts = new Int32Array(T + 1);
  for (let i = 0; i < T; i++) starts[i + 1] = starts[i] + DATA.tokens[i].toLowerCase().length;
  return starts;
})();

function tokensWith(words) {
  const hits = new Set(), wanted = words.toLowerCase();
  let token = 0;
  for (let at = WHOLE.indexOf(wanted); at >= 0; at = WHOLE.indexOf(wanted, at + wanted.length)) {
    while (STARTS[token + 1] <= at) token++;
    for (let n = token; n < T && STARTS[n] < at + wanted.length; n++) if (STARTS[n + 1] > at) hits.add(n);
  }
  return hits;
}

function kindTest(value) {
  const [group, name] = value.split(":");
  if (group === "kind") return (i) => DATA.kind[i] === Number(name);
  if (group === "speech") return (i) => DATA.speech[i] === Number(name);
  return group === "fate" ? FATES[name] : () => true;
}

function runSearch() {
  const words = byId("search").value, kind = byId("search-kind").value;
  const hits = words.trim() ? tokensWith(words.trim()) : null;
  const test = kindTest(kind);
  found.tokens = hits || kind ? [...(hits || Array.from({ length: T }, (_, i) => i))].filter(test) : [];
  found.place = -1;
  for (const { spans } of panes) {
    const marked = new Set(found.tokens);
    spans.forEach((span, i) => span.classList.toggle("found", marked.has(i)));
  }
  const asked = hits || kind;
  byId("search-note").textContent = !asked ? "" : found.tokens.length ? plural(found.tokens.length, "token") : "not found";
  byId("search-next").disabled = byId("search-before").disabled = !found.tokens.length;
}

function nextFound(by) {
  const { tokens } = found;
  if (!tokens.length) return;
  // the first step goes to the first token after the selected one
  if (found.place < 0) {
    const after = tokens.findIndex((i) => i > view.selected);
    found.place = by > 0 ? (after < 0 ? 0 : after) : (after <= 0 ? tokens.length : after) - 1;
  } else found.place = (found.place + by + tokens.length) % tokens.length;
  byId("search-note").textContent = `${found.place + 1} of ${tokens.length}`;
  change({ selected: tokens[found.place], focus: -1 });
  reveal(tokens[found.place]);
}

function buildSearch() {
  const kind = byId("search-kind");
  const group = (name, options) => {
    const host = make("optgroup", { label: name });
    for (const [value, words] of options) host.append(make("option", { value }, words));
    kind.append(host);
  };
  const used = (names, of, prefix) => names.map((name, n) => [`${prefix}:${n}`, name, n]).filter(([, , n]) => of.includes(n));
  group("kind", used(DATA.kinds, DATA.kind, "kind"));
  if (DATA.speech.length) group("part of speech", used(DATA.speeches, DATA.speech, "speech"));
  group("fate", Object.keys(FATES).filter((name) => name !== "generated" || DATA.prompt < T).map((name) => [`fate:${name}`, name]));
  byId("search").addEventListener("input", runSearch);
  kind.addEventListener("change", () => { runSearch(); nextFound(1); });
  byId("search").addEventListener("keydown", (event) => {
    if (event.key === "Enter") nextFound(event.shiftKey ? -1 : 1);
    else if (event.key === "Escape") { byId("search").value = kind.value = ""; runSearch(); byId("search").blur(); }
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  byId("search-next").addEventListener("click", () => nextFound(1));
  byId("search-before").addEventListener("click", () => nextFound(-1));
  runSearch();
}

function focusSearch() {
  byId("search").scrollIntoView({ block: "nearest" });
  byId("search").focus();
  byId("search").select();
}

// another record drops other tokens
listeners.push((changed) => { if (changed("side") && byId("search-kind").value.startsWith("fate")) runSearch(); });
