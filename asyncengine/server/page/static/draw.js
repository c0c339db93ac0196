// Canvases: sharp on every screen, in the colours of the style sheet.

/** A context whose units are CSS pixels, cleared, and its size. */
export function begin(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const scale = window.devicePixelRatio || 1;
  const pixels = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== pixels[0] || canvas.height !== pixels[1]) [canvas.width, canvas.height] = pixels;
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

let colours = null;
const dark = matchMedia("(prefers-color-scheme: dark)");
dark.addEventListener("change", () => { colours = null; });

/** The value of a custom property. */
export function colour(name) {
  colours ??= new Map();
  if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return colours.get(name);
}

export const onColours = (callback) => dark.addEventListener("change", callback);

const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

/** About as many as would make squares; where it can be, so many that the last row is full. */
function countColumns(cells, square) {
  for (let c = Math.ceil(square); c < 1.4 * square; ++c) if (cells % c === 0) return c;
  return Math.min(cells, Math.ceil(square));
}

/** The KV blocks: a square for each cell, in the colour of what its blocks are. `kinds`: [name, Uint8Array] each. */
export function drawMap(canvas, kinds, cells) {
  const { context, width, height } = begin(canvas);
  if (!cells || !width) return;
  const columns = countColumns(cells, Math.sqrt((cells * width) / height));
  const w = width / columns, h = Math.min(height / Math.ceil(cells / columns), w * 1.6);
  const gap = Math.min(1.5, w / 5);
  const free = rgb(colour("free"));
  const used = kinds.map(([name, shares]) => [rgb(colour(name)), shares]);
  for (let i = 0; i < cells; ++i) {
    let left = 1;
    const mixed = [0, 0, 0];
    for (const [c, shares] of used) {
      const part = Math.min(left, Math.sqrt(shares[i] / 255));  // a single block among many shows
      left -= part;
      for (let k = 0; k < 3; ++k) mixed[k] += part * c[k];
    }
    for (let k = 0; k < 3; ++k) mixed[k] = Math.round(mixed[k] + left * free[k]);
    context.fillStyle = `rgb(${mixed})`;
    context.fillRect((i % columns) * w, Math.floor(i / columns) * h, w - gap, h - gap);
  }
}

/** Values over time as a line on a filled ground; null is a gap. The last point is marked. */
export function drawSpark(canvas, values, places) {
  const { context, width, height } = begin(canvas);
  const line = colour("device");
  const highest = Math.max(...values.filter((v) => v !== null), 0) || 1;
  const x = (i) => width - 4 - ((values.length - 1 - i) * (width - 8)) / (places - 1);
  const y = (v) => height - 3 - (v / highest) * (height - 10);
  context.strokeStyle = colour("line");
  context.beginPath();
  context.moveTo(0, height - 2.5);
  context.lineTo(width, height - 2.5);
  context.stroke();
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  for (let i = 0; i < values.length; ++i) {
    if (values[i] === null) continue;
    const from = i;
    while (i + 1 < values.length && values[i + 1] !== null) ++i;
    context.beginPath();
    context.moveTo(x(from), y(values[from]));
    for (let k = from; k <= i; ++k) context.lineTo(x(k), y(values[k]));
    context.strokeStyle = line;
    context.stroke();
    context.lineTo(x(i), height - 3);
    context.lineTo(x(from), height - 3);
    context.globalAlpha = 0.16;
    context.fillStyle = line;
    context.fill();
    context.globalAlpha = 1;
    if (from === i) dot(context, x(i), y(values[i]), line);
  }
  const last = values.length - 1;
  if (last >= 0 && values[last] !== null) dot(context, x(last), y(values[last]), line);
}

function dot(context, x, y, fill) {
  context.fillStyle = fill;
  context.beginPath();
  context.arc(x, y, 2.5, 0, 7);
  context.fill();
}
