// The strip: what event loop, step thread and device did during the last steps, on one axis of time.
import { begin, colour } from "./draw.js";

const MOST_STEPS = 7;
const SLIVER = 1.5;  // pixels
const LANES = ["event loop", "step thread", "device"];
const LONGEST_PAUSE = 20;  // times the usual time between steps: what lies before is another burst

/** Intervals of one picture, in nanoseconds before the snapshot made into nanoseconds from the left edge. */
export function layOut({ steps, wakes }) {
  if (!steps.length) return null;
  const all = steps.map(([step, begun, packed, launched, ready, committed, rows, tokens], i) => {
    const before = i > 0 && steps[i - 1][0] === step - 1 ? -steps[i - 1][4] : -Infinity;
    return {
      step, rows, tokens, begun: -begun, packed: -packed, launched: -launched, ready: -ready, committed: -committed,
      ran: Math.max(-launched, before),
    };
  });
  const last = all.at(-1);
  const gaps = all.slice(1).map((s, i) => s.ready - all[i].ready).sort((a, b) => a - b);
  const pause = LONGEST_PAUSE * (gaps[gaps.length >> 1] ?? Infinity);
  let first = all.length - 1;
  const follows = (i) => all[i].step === all[i - 1].step + 1 && all[i].ready - all[i - 1].ready < pause;
  while (first > 0 && all.length - first < MOST_STEPS && follows(first)) --first;
  const chosen = all.slice(first);
  const handled = wakes.map(([begun, delivered, end]) => ({ begun: -begun, delivered: -delivered, end: -end }));
  const start = Math.min(chosen[0].ran, chosen.length > 2 ? Infinity : chosen[0].begun);
  const tail = Math.max(last.committed, ...handled.filter((w) => w.begun < last.committed + 1e6).map((w) => w.end));
  const end = Math.min(tail, last.committed + 0.25 * (last.committed - start));
  return { start, end, steps: all.filter((s) => s.committed > start), wakes: handled.filter((w) => w.end > start && w.begun < end) };
}

/** How much of the time the device computed, and how much of the CPU's work happened meanwhile: 0 to 1. */
export function overlap({ start, steps, wakes }) {
  const end = steps.at(-1).ready;  // of the steps behind it nothing is known yet
  const device = join(steps.map((s) => [Math.max(s.ran, start), s.ready]));
  const host = join([
    ...steps.flatMap((s) => [[s.begun, s.launched], [s.ready, s.committed]]),
    ...wakes.map((w) => [w.begun, w.end]),
  ].map(([a, b]) => [Math.max(a, start), Math.min(b, end)]).filter(([a, b]) => b > a));
  const busy = length(device), work = length(host);
  let hidden = 0;
  for (const [a, b] of host) for (const [c, d] of device) hidden += Math.max(0, Math.min(b, d) - Math.max(a, c));
  return { busy: busy / (end - start || 1), hidden: work ? hidden / work : 1 };
}

function join(intervals) {
  const joined = [];
  for (const [a, b] of intervals.sort((x, y) => x[0] - y[0])) {
    if (joined.length && a <= joined.at(-1)[1]) joined.at(-1)[1] = Math.max(joined.at(-1)[1], b);
    else joined.push([a, b]);
  }
  return joined;
}

const length = (intervals) => intervals.reduce((sum, [a, b]) => sum + b - a, 0);

export function duration(ns) {
  if (ns >= 1e9) return `${(ns / 1e9).toFixed(ns >= 1e10 ? 0 : 1)} s`;
  if (ns >= 1e6) return `${(ns / 1e6).toFixed(ns >= 1e8 ? 0 : ns >= 1e7 ? 1 : 2).replace(/\.0+$/, "")} ms`;
  return `${(ns / 1e3).toFixed(ns >= 1e4 ? 0 : 1).replace(/\.0$/, "")} µs`;
}

export const describe = (s) =>
  `Step ${s.step.toLocaleString("en")}: ${s.tokens} token${s.tokens === 1 ? "" : "s"} of ${s.rows} sequence${s.rows === 1 ? "" : "s"} · ` +
  `schedule, pack ${duration(s.packed - s.begun)} · launch ${duration(s.launched - s.packed)} · ` +
  `compute ${duration(s.ready - s.ran)} · commit ${duration(s.committed - s.ready)}`;

/** The step at a place of the canvas, if any. */
export function stepAt(canvas, picture, offset) {
  const time = picture.start + (offset / canvas.clientWidth) * (picture.end - picture.start);
  return picture.steps.find((s) => s.ran <= time && time <= s.ready);
}

export function draw(canvas, picture, chosen) {
  const { context: c, width, height } = begin(canvas);
  const axis = 16, lane = (height - axis) / LANES.length, label = 13, bar = lane - label - 5;
  const span = picture ? picture.end - picture.start : 1;
  const x = (t) => ((t - picture.start) / span) * width;
  const top = (i) => i * lane + label;
  c.font = `11px ${getComputedStyle(canvas).fontFamily}`;
  c.textBaseline = "alphabetic";
  LANES.forEach((name, i) => {
    c.fillStyle = colour("sunken");
    c.fillRect(0, top(i), width, bar);
    c.fillStyle = colour("muted");
    c.fillText(name, 0, top(i) - 3);
  });
  if (!picture) return;
  drawAxis(c, width, height, span);
  const box = (i, from, to, name) => {
    const left = Math.max(0, x(from)), right = Math.min(width, x(to));
    if (right < 0 || left > width) return;
    c.fillStyle = colour(name);
    c.fillRect(left, top(i), Math.max(SLIVER, right - left), bar);
  };
  for (const w of picture.wakes) {
    box(0, w.delivered, w.end, "stream");
    box(0, w.begun, w.delivered, "deliver");
  }
  drawThread(picture, (from, to, name) => box(1, from, to, name), (SLIVER / width) * span);
  for (const s of picture.steps) {
    drawDevice(c, s, s === chosen, { left: Math.max(0, x(s.ran)), right: Math.min(width, x(s.ready)), top: top(2), bar });
  }
}

/** In order of time: what is too short to be seen is drawn as a sliver, and the next one beside it. */
function drawThread(picture, box, shortest) {
  const boxes = picture.steps.flatMap((s) => [
    [s.begun, s.packed, "schedule"], [s.packed, s.launched, "launch"], [s.ready, s.committed, "commit"],
  ]).sort((a, b) => a[0] - b[0]);
  let free = -Infinity;
  for (const [begun, end, name] of boxes) {
    const from = Math.max(begun, free);
    free = Math.max(end, from + shortest);
    box(from, free, name);
  }
}

function drawDevice(c, s, chosen, { left, right, top, bar }) {
  if (right <= left) return;
  c.globalAlpha = s.step % 2 ? 0.82 : 1;  // neighbours differ
  c.fillStyle = colour("device");
  c.strokeStyle = colour("text");
  c.fillRect(left + 0.5, top, Math.max(1, right - left - 1), bar);
  c.globalAlpha = 1;
  if (chosen) c.strokeRect(left + 1.5, top + 1, right - left - 3, bar - 2);
  const text = `${s.step}`;
  if (right - left < c.measureText(text).width + 8) return;
  c.fillStyle = colour("on-accent");
  c.textAlign = "center";
  c.fillText(text, (left + right) / 2, top + bar / 2 + 4);
  c.textAlign = "left";
}

function drawAxis(c, width, height, span) {
  const rough = (span / width) * 70;
  const power = 10 ** Math.floor(Math.log10(rough));
  const tick = [1, 2, 5, 10].map((m) => m * power).find((t) => t >= rough);
  c.strokeStyle = colour("line");
  c.fillStyle = colour("muted");
  c.lineWidth = 1;
  for (let t = 0; t < span; t += tick) {
    const at = Math.round((t / span) * width) + 0.5;
    c.beginPath();
    c.moveTo(at, height - 15);
    c.lineTo(at, height - 11);
    c.stroke();
    const text = t ? duration(t) : "0";
    if (at + 3 + c.measureText(text).width < width) c.fillText(text, at + 3, height - 3);
  }
}
