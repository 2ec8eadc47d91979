// Masks, query × key: small ones of every layer, a large one of the chosen layer.

// visible(k, j) iff j ≤ k < drop[j]; each pixel is the share of its pairs that are seen.
// One column of pixels is a difference array over rows, so a mask costs T + size², not T².
function maskShares(layer, size) {
  const seen = new Float32Array(size * size), pairs = new Float32Array(size * size);
  const add = (grid, x, first, last) => {
    // rows [first, last) of tokens, spread over pixels
    let row = first;
    while (row < last) {
      const y = Math.floor((row * size) / T);
      const stop = Math.min(last, Math.ceil(((y + 1) * T) / size));
      grid[y * size + x] += stop - row;
      row = stop;
    }
  };
  const drop = current().drop[layer];
  for (let j = 0; j < T; j++) {
    const x = Math.floor((j * size) / T);
    add(seen, x, j, Math.min(drop[j], T));
    add(pairs, x, j, T);
  }
  return { seen, pairs };
}

function parse(colour) {
  const context = document.createElement("canvas").getContext("2d");
  context.fillStyle = colour;
  context.fillRect(0, 0, 1, 1);
  return context.getImageData(0, 0, 1, 1).data;
}

function drawMask(canvas, layer, cssSize) {
  const ratio = Math.min(window.devicePixelRatio || 1, 2);
  const size = Math.max(1, Math.min(T, Math.round(cssSize * ratio)));
  canvas.width = canvas.height = size;
  canvas.style.width = canvas.style.height = `${cssSize}px`;
  const { seen, pairs } = maskShares(layer, size);
  const full = parse(colours().accent), empty = parse(colours().empty);
  const image = new ImageData(size, size);
  for (let p = 0; p < size * size; p++) {
    if (pairs[p] === 0) continue;
    const share = seen[p] / pairs[p];
    for (let c = 0; c < 3; c++) image.data[4 * p + c] = empty[c] + share * (full[c] - empty[c]);
    image.data[4 * p + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}

const SMALL = 104;
const smallMasks = [];

function buildMasks() {
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      watcher.unobserve(entry.target);
      const layer = Number(entry.target.dataset.layer);
      smallMasks[layer].drawn = true;
      drawMask(entry.target, layer, SMALL);
    }
  }, { rootMargin: "200px" });
  for (let l = 0; l < L; l++) {
    const canvas = make("canvas", { "data-layer": l, "aria-hidden": "true" });
    canvas.style.width = canvas.style.height = `${SMALL}px`;
    const note = make("span", {});
    const button = make("button", { type: "button", class: "mask" }, canvas, note);
    button.addEventListener("click", () => enlarge(l));
    byId("masks").append(button);
    smallMasks.push({ canvas, button, note, drawn: false });
    watcher.observe(canvas);
  }
}

function nameMasks() {
  smallMasks.forEach(({ button, note }, l) => {
    const share = percent(current().sparsityOverall(l));
    note.textContent = `${DATA.layers[l]}: ${share}`;
    button.setAttribute("aria-label", `Enlarge the mask of layer ${DATA.layers[l]}: ${share} dropped over all pairs`);
  });
}

function redrawMasks() {
  smallMasks.forEach(({ canvas, drawn }, l) => { if (drawn) drawMask(canvas, l, SMALL); });
  if (byId("large").open) drawLarge();
}

let largeSize = 0;
function drawLarge() {
  largeSize = Math.floor(Math.max(160, Math.min(window.innerWidth - 64, window.innerHeight - 190, 720)));
  drawMask(byId("large-mask"), view.layer, largeSize);
  byId("large-title").textContent = `Layer ${DATA.layers[view.layer]}: ${percent(current().sparsityOverall(view.layer))} dropped over all pairs`;
  byId("large-note").textContent = "Point at a cell to see which token looks at which.";
}

function enlarge(layer) {
  change({ layer });
  if (!byId("large").open) byId("large").showModal();
  drawLarge();
}

// the note on cell (k, j) of the large mask
function pairNote(k, j) {
  const query = `${shown(k)} (${k})`, key = `${shown(j)} (${j})`;
  const step = current().drop[view.layer][j];
  if (j > k) return `${key} comes after ${query}.`;
  if (j === k) return `${query} sees itself.`;
  if (step > k) return `${query} sees ${key}.`;
  return `${query} cannot see ${key}: ${shown(step)} (${step}) dropped it.`;
}

function listenMasks() {
  const large = byId("large");
  const step = (by) => enlarge((view.layer + by + L) % L);
  byId("large-before").addEventListener("click", () => step(-1));
  byId("large-after").addEventListener("click", () => step(1));
  byId("large-close").addEventListener("click", () => large.close());
  large.addEventListener("keydown", (event) => {
    if (event.key === "ArrowLeft") step(-1);
    else if (event.key === "ArrowRight") step(1);
  });
  byId("large-mask").addEventListener("pointermove", (event) => {
    const j = Math.min(T - 1, Math.floor((event.offsetX / largeSize) * T));
    const k = Math.min(T - 1, Math.floor((event.offsetY / largeSize) * T));
    if (j < 0 || k < 0) return;
    byId("large-note").textContent = pairNote(k, j);
  });
}

listeners.push((changed) => {
  if (changed("side")) { nameMasks(); redrawMasks(); }
  if (changed("layer")) smallMasks.forEach(({ button }, l) => button.classList.toggle("chosen", l === view.layer));
});
