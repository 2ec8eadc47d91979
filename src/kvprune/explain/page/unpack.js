// Arrays of numbers, which packing.py wrote: base64, deflate, byte planes.

const TYPES = { uint8: Uint8Array, int8: Int8Array, uint16: Uint16Array, int16: Int16Array, uint32: Uint32Array, int32: Int32Array };
const MISSING = -32768;

const CAN_UNPACK = typeof DecompressionStream === "function";

async function unpack(packed) {
  const letters = atob(packed.data);
  const compressed = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) compressed[i] = letters.charCodeAt(i);
  const stream = new Blob([compressed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  const Type = TYPES[packed.type], width = Type.BYTES_PER_ELEMENT;
  const values = new Type(planes.length / width);
  // the first plane holds the low bytes
  for (let plane = width - 1; plane >= 0; plane--) {
    const start = plane * values.length;
    for (let i = 0; i < values.length; i++) values[i] = (values[i] << 8) | planes[start + i];
  }
  return values;
}

// rounded numbers; NaN where there is none
async function unpackNumbers(packed) {
  return Float32Array.from(await unpack(packed), (whole) => (whole === MISSING ? NaN : whole * packed.step));
}

function rows(values, width) {
  return Array.from({ length: values.length / width }, (_, n) => values.subarray(n * width, (n + 1) * width));
}

if (!CAN_UNPACK) {
  const trouble = document.getElementById("trouble");
  trouble.hidden = false;
  trouble.textContent = "This browser cannot unpack the numbers of the page. Please open it in Chrome 80, Firefox 113, Safari 16.4 or a later version.";
  return;
}
