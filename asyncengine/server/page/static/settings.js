// What a request asks for beside its messages. Kept for as long as the tab is open.
import { setKey } from "./api.js";

const DEFAULTS = { system: "", temperature: "0.7", top_p: "", max_tokens: "", seed: "", stop: "" };
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const STORE = "asyncengine.settings";
const KEY = "asyncengine.key";

const form = document.getElementById("settings-form");
const dialog = document.getElementById("settings");
const changed = new EventTarget();

function stored(name) {
  try {
    return sessionStorage.getItem(name);
  } catch {
    return null;  // storage is switched off
  }
}

function store(name, value) {
  try {
    sessionStorage.setItem(name, value);
  } catch {
    // then it lasts until the page is loaded again
  }
}

const values = () => Object.fromEntries(Object.keys(DEFAULTS).map((name) => [name, form.elements[name].value]));

function fill(from) {
  for (const name of Object.keys(DEFAULTS)) form.elements[name].value = from[name] ?? DEFAULTS[name];
}

function keep() {
  store(STORE, JSON.stringify(values()));
  store(KEY, form.elements.key.value);
  setKey(form.elements.key.value.trim());
}

export const system = () => form.elements.system.value.trim();

/** Parameters of a request: what is empty is left to the server. */
export function parameters() {
  const body = {};
  for (const name of NUMBERS) {
    const { valueAsNumber } = form.elements[name];
    if (!Number.isNaN(valueAsNumber)) body[name] = valueAsNumber;
  }
  const stop = form.elements.stop.value.split("\n").filter((line) => line);
  if (stop.length) body.stop = stop;
  return body;
}

/** Calls back when the dialog was closed. */
export const onChange = (callback) => changed.addEventListener("change", callback);

export function open(focus = "temperature") {
  if (!dialog.open) dialog.showModal();
  form.elements[focus].focus();
}

export function setUp(talks) {
  document.getElementById("system-field").hidden = talks !== "chat";
}

try {
  fill(JSON.parse(stored(STORE)) ?? DEFAULTS);
} catch {
  fill(DEFAULTS);
}
form.elements.key.value = stored(KEY) ?? "";
setKey(form.elements.key.value.trim());
form.addEventListener("input", keep);
dialog.addEventListener("close", () => changed.dispatchEvent(new Event("change")));
dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
document.getElementById("open-settings").addEventListener("click", () => open());
document.getElementById("reset-settings").addEventListener("click", () => { fill(DEFAULTS); keep(); });
