// The list of conversations: find, open, rename, delete, export and import.
import { chat, open as openChat } from "./chat.js";
import { make } from "./markdown.js";
import { $, button, on } from "./message.js";
import * as store from "./store.js";
import { matches, read } from "./tree.js";

const dialog = $("list"), find = $("find");
const MOST_BYTES = 50e6;  // of a file
let kept, found;

function show(again = true) {
  if (again) kept = store.all();
  const { chats, unread } = kept;
  found = chats.filter((one) => matches(one, find.value.trim()));
  $("chats").replaceChildren(...found.map(item));
  $("export").disabled = !found.length;
  $("list-state").textContent = [
    found.length ? "" : `No conversation ${chats.length ? "has these words" : "so far"}.`,
    store.problem, unread ? `${unread} that cannot be read are left as they are.` : "",
  ].join(" ");
}

function item(one) {
  const title = one.title || "Without a title", time = new Date(one.time).toLocaleString("en", { dateStyle: "medium", timeStyle: "short" });
  const name = button("", () => openChat(one));
  name.append(make("span", "", title), make("time", "", time));
  if (one.id === chat.id) name.ariaCurrent = "true";
  return make("li", "", name, button("✎", () => rename(one), `Rename ${title}`), button("✕", () => remove(one), `Delete ${title}`));
}

function rename(one) {
  const what = one.id === chat.id ? chat : one;
  what.title = prompt("Title", one.title)?.trim().slice(0, 200) || one.title;
  store.save(what, what.time);
  open();
}

function remove(one) {
  if (!confirm(`Delete “${one.title}”?`)) return;
  store.remove(one.id);
  if (one.id === chat.id) openChat();
  open();
}

function save() {
  const text = JSON.stringify({ format: "asyncengine conversations", conversations: found }, null, 1);
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = "conversations.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

async function load([file]) {
  try {
    if (file.size > MOST_BYTES) throw new Error("it is too large");
    const chats = read(await file.text());
    chats.forEach(store.put);
    $("list-note").textContent = `${chats.length} imported.`;
  } catch (error) {
    $("list-note").textContent = `Nothing is imported. This is no file that the page exported: ${error.message}.`;
  }
  $("import").value = "";
  show();
}

export function open() {
  if (!dialog.open) {
    find.value = $("list-note").textContent = "";
    dialog.showModal();
  }
  show();
  find.focus();
}

export function setUp() {
  on("open-list", "click", open);
  on("find", "input", () => show(false));
  on("export", "click", save);
  on("choose-import", "click", () => $("import").click());
  on("import", "change", () => load($("import").files));
  store.onChange(() => { if (dialog.open) show(); });
}
