// Conversations in the browser's storage, a record each. What it does not take lasts as long as the tab.
import { clean, isEmpty, merge } from "./tree.js";

const PREFIX = "asyncengine.chat.";
const memory = new Map();  // records that the storage did not take

export let problem = "";  // why the last record was not kept

function attempt(act) {  // storage may be off or full, a record broken
  try {
    return act();
  } catch {
    return null;
  }
}

export const recall = (area, name) => attempt(() => globalThis[area].getItem(name));
export const remember = (area, name, value) => attempt(() => globalThis[area].setItem(name, value));

/** The conversation, or null. */
export const get = (id) => attempt(() => clean(JSON.parse(memory.get(id) ?? recall("localStorage", PREFIX + id))));

/** Keeps a conversation with what another tab has added. */
export function save(chat, time = Date.now()) {
  const stored = get(chat.id);
  if (stored) merge(chat, stored);
  chat.time = time;
  put(chat);
}

export function put(chat) {
  const nodes = chat.nodes.filter((node) => node.role === "user" || !isEmpty(node));
  const tip = (nodes.find(({ id }) => id === chat.tip) ?? nodes.at(-1))?.id ?? "";
  const text = JSON.stringify({ ...chat, nodes, tip });
  try {
    localStorage.setItem(PREFIX + chat.id, text);
    memory.delete(chat.id);
    problem = "";
  } catch ({ name }) {
    memory.set(chat.id, text);
    problem = name === "QuotaExceededError"
      ? "The browser's storage is full. What is new is lost with this tab: export conversations, and delete some."
      : "The browser keeps nothing for this page. Conversations are lost with this tab.";
  }
}

export function remove(id) {
  memory.delete(id);
  attempt(() => localStorage.removeItem(PREFIX + id));
}

/** The latest first; `unread` is the number of records that cannot be read. */
export function all() {
  const kept = attempt(() => Object.keys(localStorage).filter((name) => name.startsWith(PREFIX))) ?? [];
  const ids = [...new Set([...memory.keys(), ...kept.map((name) => name.slice(PREFIX.length))])];
  const chats = ids.map(get).filter(Boolean).sort((a, b) => b.time - a.time);
  return { chats, unread: ids.length - chats.length };
}

/** Calls back with the id of what another tab has changed; undefined: all. */
export const onChange = (callback) => addEventListener("storage", ({ key }) => {
  if (!key || key.startsWith(PREFIX)) callback(key?.slice(PREFIX.length));
});
