// Brings the page to life: the model's name and health, shortcuts, and what a narrow screen shows.
import { exists } from "./api.js";
import * as chat from "./chat.js";
import * as engine from "./engine.js";
import * as list from "./list.js";
import { $, on } from "./message.js";
import * as settings from "./settings.js";

const RETRY_MS = 1500;
const STATES = {
  loading: "the model is loading", ready: "", draining: "the server is shutting down", closed: "the engine is closed",
  dead: "the engine is dead", gone: "the server cannot be reached", locked: "an API key is needed",
};

let model = null, state = "loading", retry = 0, tried;

function size(parameters) {
  const [unit, name] = parameters >= 1e9 ? [1e9, "B"] : [1e6, "M"];
  return parameters && `${Number((parameters / unit).toPrecision(3))} ${name} parameters`;
}

function show() {
  const about = model ? [model.name, size(model.num_parameters), `${model.dtype} on ${model.device}`] : [];
  $("model").textContent = (STATES[state] ? [model?.name, STATES[state]] : about).filter(Boolean).join(" · ");
  $("health").dataset.health = state;
  document.title = model ? `${model.name} · asyncengine` : "asyncengine";
}

function setHealth(news) {
  const back = state !== "ready" && news === "ready";
  state = news;
  show();
  if (back && !model) meet();
}

async function meet() {
  clearTimeout(retry);
  try {
    const news = await chat.askModel();
    state = news.health;
    if (news.name) {
      model = news;
      for (const node of document.querySelectorAll("[data-chat]")) node.hidden = model.talks !== "chat";
    }
  } catch (error) {
    state = error.status === 401 ? "locked" : "gone";
    tried = settings.key();
    if (state === "locked" && !$("settings").open) settings.openForKey();
  }
  show();
  if (/loading|gone/.test(state)) retry = setTimeout(meet, RETRY_MS);
}

function view(name) {
  document.body.dataset.view = name;
  for (const other of ["chat", "engine"]) $(`show-${other}`).setAttribute("aria-pressed", String(other === name));
  engine.look();
}

document.addEventListener("keydown", (event) => {
  const { key, shiftKey } = event, control = event.ctrlKey || event.metaKey;
  if (event.isComposing) return;
  if (key === "Escape" && !document.querySelector("dialog[open]")) chat.escape();
  else if (control && shiftKey && key.toLowerCase() === "o") chat.open();
  else if (control && !shiftKey && key === "k") list.open();
  else return;
  event.preventDefault();
});
for (const name of ["chat", "engine"]) on(`show-${name}`, "click", () => view(name));
matchMedia("(max-width: 960px)").addEventListener("change", () => engine.look());
on("settings", "close", () => { if (!model && settings.key() !== tried) meet(); engine.look(); });
for (const dialog of document.querySelectorAll("dialog")) {
  dialog.addEventListener("click", ({ target }) => { if (target === dialog) dialog.close(); });
}
chat.setUp();
list.setUp();
engine.setUp(setHealth);
meet();
exists("docs").then((served) => { $("docs").hidden = !served; });
