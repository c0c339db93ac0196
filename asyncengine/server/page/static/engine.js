// The view of the engine: asks for figures four times a second while somebody looks, and draws them.
import { getJson, stream } from "./api.js";
import { question } from "./chat.js";
import { drawMap, drawSpark, onColours } from "./draw.js";
import { describe, draw, duration, layOut, overlap, stepAt } from "./strip.js";

const $ = (id) => document.getElementById(id);
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const PERIOD_MS = 250, CALM_PERIOD_MS = 1000, RETRY_MS = 3000;
const SECONDS = 180;  // of history, a value each

let timer = 0;
let asking = null;
let latest = null, picture = null, hovered = null, frozen = false;
let past = null;  // figures of a second ago, and what has been since
const history = { rate: [], ttft: [], itl: [] };
let onHealth = () => {};

const looking = () => document.visibilityState === "visible" && $("engine").checkVisibility();

/** Begins or stops to ask, as somebody looks or not. */
export function look() {
  clearTimeout(timer);
  if (!looking()) {
    asking?.abort();
    past = null;
  } else if (!asking) ask();
}

async function ask() {
  asking = new AbortController();
  let wait = calm.matches ? CALM_PERIOD_MS : PERIOD_MS;
  const begun = performance.now();
  try {
    take(await getJson("page/stats", asking.signal));
    notice("");
  } catch (error) {
    if (error.name !== "AbortError") {
      wait = RETRY_MS;
      past = null;
      onHealth(error.status === 401 ? "locked" : "gone");
      notice(error.status === 401 ? "The engine's figures need an API key: see Settings." : error.message);
    }
  }
  asking = null;
  clearTimeout(timer);
  if (looking()) timer = setTimeout(ask, Math.max(0, wait - (performance.now() - begun)));
}

function notice(text) {
  $("engine-notice").textContent = text;
  $("engine-notice").hidden = !text;
}

function take(figures) {
  onHealth(figures.health);
  if (!figures.blocks) return;
  latest = figures;
  remember(figures);
  if (!frozen) picture = layOut(figures) ?? picture;
  show();
}

function remember(figures) {
  if (past && figures.time_s - past.time_s < 0.95) return;
  if (past) {
    const mean = (name) => {
      const count = figures[name].count - past[name].count;
      return count > 0 ? (figures[name].seconds - past[name].seconds) / count : null;
    };
    const rate = (figures.generation_tokens - past.generation_tokens) / (figures.time_s - past.time_s);
    for (const [name, value] of [["rate", rate], ["ttft", mean("ttft")], ["itl", mean("itl")]]) {
      history[name].push(value);
      if (history[name].length > SECONDS) history[name].shift();
    }
  }
  past = figures;
}

const count = (n) => (n >= 1e5 ? `${Math.round(n / 1e3)}k` : n >= 1e4 ? `${(n / 1e3).toFixed(1)}k` : Math.round(n).toLocaleString("en"));
const bytes = (base64) => Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
const percent = (share) => `${share > 0 && share < 0.01 ? (100 * share).toFixed(1) : Math.round(100 * share)}%`;

function show() {
  const { blocks } = latest;
  $("running").textContent = count(latest.running) + (latest.on_host ? `, ${count(latest.on_host)} on host` : "");
  $("waiting").textContent = count(latest.waiting);
  $("rate").textContent = history.rate.length ? count(history.rate.at(-1)) : "–";
  $("usage").textContent = percent(1 - blocks.free / blocks.total);
  showBlocks(blocks);
  showStrip();
  showHistory();
}

function showBlocks(blocks) {
  const kinds = ["held", "shared", "cached"].map((name) => [name, bytes(blocks[name])]);
  drawMap($("map"), kinds, kinds[0][1].length);
  const per = blocks.per_cell > 1 ? `, ${blocks.per_cell} a square` : "";
  const used = (blocks.total - blocks.free).toLocaleString("en");
  $("map-note").textContent = `${blocks.total.toLocaleString("en")} blocks${per}`;
  $("hits").textContent = latest.prefix_queries ? `${percent(latest.prefix_hits / latest.prefix_queries)} hits` : "";
  $("held-count").textContent = used;
  $("map").setAttribute("aria-label", `${used} of ${blocks.total} KV blocks are in use`);
}

function showStrip() {
  const chosen = hovered && picture ? stepAt($("strip"), picture, hovered) : null;
  const idle = !frozen && latest && !latest.running && !latest.waiting && !latest.on_host;
  draw($("strip"), picture, chosen);
  if (!picture) {
    if (idle) $("overlap").textContent = "Idle. No step so far.";
    return;
  }
  const { busy, hidden } = overlap(picture);
  const words = `${idle ? "Idle. In the last steps: device" : "Device"} busy ${percent(busy)} of ` +
    `${duration(picture.end - picture.start)}. ${percent(hidden)} of the CPU's work was done meanwhile.`;
  $("overlap").textContent = words;
  $("step").textContent = describe(chosen ?? picture.steps.at(-1));
  $("strip").setAttribute("aria-label", `${words} ${$("step").textContent}`);
}

function showHistory() {
  const units = { rate: (v) => count(v), ttft: (v) => duration(v * 1e9), itl: (v) => duration(v * 1e9) };
  const places = history.rate.length <= 30 ? 30 : Math.min(SECONDS, 60 * Math.ceil(history.rate.length / 60));
  for (const [name, values] of Object.entries(history)) {
    const value = values.findLast((v) => v !== null);
    $(`spark-${name}-now`).textContent = value === undefined ? "–" : units[name](value);
    drawSpark($(`spark-${name}`), values, places);
  }
  $("history-note").textContent = `${places < 60 ? `${places} s` : `${Math.round(places / 60)} min`}, while you watch`;
}

// ---- eight requests at once ----

let work = null;

async function toggleWork() {
  if (work) return work.abort();
  work = new AbortController();
  $("work").setAttribute("aria-pressed", "true");
  $("work").textContent = "Stop them";
  const topics = ["a fox", "a bear", "a robot", "a kite", "a whale", "a mouse", "a king", "a tree"];
  const results = await Promise.allSettled(topics.map((topic) => read(topic, work.signal)));
  const failure = results.find(({ reason }) => reason && reason.name !== "AbortError");
  if (failure) notice(failure.reason.message);
  work = null;
  $("work").setAttribute("aria-pressed", "false");
  $("work").textContent = "Send eight";
}

async function read(topic, signal) {
  const [path, body] = question(`Tell me a story about ${topic}.`);
  for await (const _ of stream(path, body, signal)) { /* nobody reads it */ }
}

export function setUp(health) {
  onHealth = health;
  $("strip").addEventListener("pointermove", (event) => { hovered = event.offsetX; showStrip(); });
  $("strip").addEventListener("pointerleave", () => { hovered = null; showStrip(); });
  $("freeze").addEventListener("click", () => {
    frozen = !frozen;
    $("freeze").setAttribute("aria-pressed", String(frozen));
  });
  $("work").addEventListener("click", toggleWork);
  document.addEventListener("visibilitychange", look);
  new ResizeObserver(() => { if (latest) show(); else drawEmpty(); }).observe($("engine"));
  onColours(() => { if (latest) show(); });
  drawEmpty();
  look();
}

const drawEmpty = () => draw($("strip"), null);
