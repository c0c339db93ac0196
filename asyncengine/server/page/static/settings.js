// What a request asks for beside its messages: of the open conversation. A new one has what was used last.
import { setKey } from "./api.js";
import { $, on } from "./message.js";
import { recall, remember } from "./store.js";
import { FIELDS } from "./tree.js";

const DEFAULTS = { temperature: "0.7" }, NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const LAST = "asyncengine.settings", KEY = "asyncengine.key";

const fields = $("settings-form").elements;
let edited = () => {};

export const values = () => Object.fromEntries(FIELDS.map((name) => [name, fields[name].value]));

export function fill(from) {
  for (const name of FIELDS) fields[name].value = from[name] ?? "";
}

export const key = () => fields.key.value.trim();
export const system = () => fields.system.value.trim();

/** What is empty is left to the server. Throws an Error where the tools are no JSON. */
export function parameters(chat) {
  const body = {};
  for (const name of NUMBERS) {
    const { valueAsNumber } = fields[name];
    if (!Number.isNaN(valueAsNumber)) body[name] = valueAsNumber;
  }
  const stop = fields.stop.value.split("\n").filter((line) => line);
  if (stop.length) body.stop = stop;
  try {
    if (chat && fields.tools.value.trim()) body.tools = JSON.parse(fields.tools.value);
  } catch {
    throw new Error("The tools in Settings are not JSON.");
  }
  return body;
}

function keep() {
  setKey(key());
  remember("sessionStorage", KEY, fields.key.value);
  remember("localStorage", LAST, JSON.stringify(values()));
  edited(values());
}

/** Calls back with the values when one was changed. */
export const onEdit = (callback) => { edited = callback; };

export function open(focus = "temperature", why = "") {
  $("key-why").textContent = why;
  $("key-why").hidden = !why;
  if (!$("settings").open) $("settings").showModal();
  fields[focus].focus();
  fields[focus].select();
}

export const openForKey = () => open("key", key() ? "The server refused this key." : "This server asks for an API key.");

fill(DEFAULTS);
try {
  fill(JSON.parse(recall("localStorage", LAST)) ?? DEFAULTS);
} catch {
  // a broken record
}
fields.key.value = recall("sessionStorage", KEY) ?? "";
setKey(key());
on("settings-form", "input", keep);
on("open-settings", "click", () => open());
on("reset-settings", "click", () => { fill(DEFAULTS); keep(); });
