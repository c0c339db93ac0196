// The conversation: what was said, sending, streaming, stopping, and saying it again or differently.
import { getJson, stream } from "./api.js";
import { copyButton, render } from "./markdown.js";
import * as settings from "./settings.js";

const $ = (id) => document.getElementById(id);
const input = $("input"), transcript = $("transcript"), scroll = $("scroll");

const STARTERS = {
  chat: ["Tell me a story about a fox.", "What is a KV cache? Two sentences.", "Write a haiku about an event loop."],
  small: ["Tell me a story about a fox.", "Write a story about a lighthouse.", "Tell me a tale of two friends."],
  text: ["Once upon a time", "The first rule of programming is", "Dear diary,"],
};
const SMALL = 50e6;  // parameters
const TEXT_TOKENS = 200;

let model = { name: "", talks: "chat", max_model_len: 0, num_parameters: 0 };
let messages = [];  // {role, text, node, body, foot}
let running = null;  // the AbortController of the answer under way
let before = null;  // what an edit took away

export function setModel(news) {
  model = news;
  const small = model.num_parameters > 0 && model.num_parameters < SMALL;
  const chat = model.talks === "chat";
  $("welcome-title").textContent = chat ? `Chat with ${model.name}.` : `${model.name} continues your text.`;
  $("welcome-text").textContent = model.talks === "tokens"
    ? "This server was started without a tokenizer. Its API takes and gives token ids."
    : `${small ? "A very small model that writes little stories. " : ""}Write below, or begin with one of these:`;
  const words = chat ? "Your message" : "Your text";
  input.placeholder = words;
  document.querySelector("label[for=input]").textContent = words;
  input.disabled = $("send").disabled = model.talks === "tokens";
  $("starters").replaceChildren(...(model.talks === "tokens" ? [] : STARTERS[chat && small ? "small" : model.talks]).map(starter));
}

function starter(text) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = text;
  button.addEventListener("click", () => say(text));
  const item = document.createElement("li");
  item.append(button);
  return item;
}

// ---- what is shown ----

function add(role, text = "") {
  const node = document.createElement("article");
  node.className = `message ${role}`;
  const name = document.createElement("h3");
  name.className = "hidden";
  name.textContent = role === "user" ? "You" : model.name;
  const body = document.createElement("div");
  body.className = "body";
  const foot = document.createElement("div");
  foot.className = "foot";
  node.append(name, body, foot);
  transcript.append(node);
  const message = { role, text, node, body, foot, figures: "" };
  messages.push(message);
  show(message);
  return message;
}

function show(message) {
  if (message.role === "assistant" && model.talks === "chat") return render(message.body, message.text);
  message.body.classList.add("plain");
  if (message.role === "user") message.body.textContent = message.text;
  else {
    const text = message.body.firstChild ?? message.body.appendChild(document.createElement("span"));
    text.textContent = message.text;
  }
}

function remove(from) {
  for (const message of messages.splice(from)) message.node.remove();
}

const action = (name, act) => {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = name;
  button.addEventListener("click", act);
  return button;
};

function update() {
  $("welcome").hidden = messages.length > 0;
  $("new-chat").disabled = messages.length === 0;
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  $("editing").hidden = before === null;
  messages.forEach((message, i) => {
    const { role, foot } = message;
    foot.replaceChildren();
    if (running) return;
    if (role === "user" && i >= messages.length - 2) foot.append(action("Edit", edit));
    if (role !== "assistant") return;
    foot.append(copyButton(() => message.text, "Copy"));
    if (i === messages.length - 1) foot.append(action("Regenerate", again));
    const figures = foot.appendChild(document.createElement("span"));
    figures.className = "figures";
    figures.textContent = message.figures;
  });
}

function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

const atEnd = () => scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60;
const toEnd = () => { scroll.scrollTop = scroll.scrollHeight; };

// ---- what is asked ----

/** The transcript as one text: what a model without a chat template continues. */
function asText() {
  return messages.reduce((all, { text, role }) => {
    const joint = all && text && role === "user" && !/\s$/.test(all) && !/^\s/.test(text) ? "\n\n" : "";
    return all + joint + text;
  }, "");
}

export function question(text) {
  const fields = { ...settings.parameters(), model: model.name || undefined };
  if (model.talks !== "chat") {
    fields.max_tokens ??= TEXT_TOKENS;
    const room = model.max_model_len - fields.max_tokens;
    if (room > 0) fields.truncate_prompt_tokens = room;  // of a long text its end counts
    return ["v1/completions", { ...fields, prompt: text ?? asText() }];
  }
  const said = text ? [{ role: "user", content: text }] : messages.map(({ role, text: content }) => ({ role, content }));
  if (settings.system()) said.unshift({ role: "system", content: settings.system() });
  return ["v1/chat/completions", { ...fields, messages: said }];
}

const textOf = (event) => event.choices[0]?.delta?.content ?? event.choices[0]?.text ?? "";

function figures(start, first, tokens, reason) {
  const seconds = (performance.now() - first) / 1000;
  const speed = tokens > 1 && seconds > 0.02 ? `, ${Math.round((tokens - 1) / seconds).toLocaleString("en")}/s` : "";
  const end = { length: ", cut at the limit", stopped: ", stopped" }[reason] ?? "";
  return `${tokens.toLocaleString("en")} tokens${speed}, the first after ${Math.round(first - start)} ms${end}`;
}

async function answer() {
  notice("");
  focus();  // the button that was pressed goes away
  const asked = question();
  const message = add("assistant");
  message.node.setAttribute("aria-busy", "true");  // a screen reader reads it when it is whole
  running = new AbortController();
  update();
  toEnd();
  const start = performance.now();
  let first = 0, tokens = 0, events = 0, reason = "", frame = 0;
  const draw = () => {
    frame = 0;
    const follow = atEnd();
    show(message);
    if (follow) toEnd();
  };
  try {
    for await (const event of stream(...asked, running.signal)) {
      const text = textOf(event);
      if (text) {
        first ||= performance.now();
        ++events;
        message.text += text;
        frame ||= requestAnimationFrame(draw);
      }
      reason = event.choices[0]?.finish_reason ?? reason;
      if (event.usage) tokens = event.usage.completion_tokens;
    }
  } catch (error) {
    reason = "stopped";
    if (error.name !== "AbortError") failed(error);
  }
  cancelAnimationFrame(frame);
  running = null;
  if (message.node.isConnected) {
    if (first) message.figures = figures(start, first, tokens || events, reason);
    draw();
    message.node.removeAttribute("aria-busy");
    if (!message.text && reason === "stopped") remove(messages.indexOf(message));
  }
  update();
  if (atEnd()) toEnd();
}

function failed(error) {
  notice(error.message);
  if (error.status === 401) settings.open("key");
}

function say(text) {
  if (running) return;
  before = null;
  if (text || model.talks === "chat") add("user", text);
  answer();
}

function again() {
  remove(messages.length - 1);
  answer();
}

/** Takes the last message and its answer back into the field. */
function edit() {
  const from = messages.findLastIndex(({ role }) => role === "user");
  before = { messages: messages.slice(from), text: input.value };
  input.value = messages[from].text;
  remove(from);
  update();
  grow();
  input.focus();
}

function cancelEdit() {
  for (const message of before.messages) {
    transcript.append(message.node);
    messages.push(message);
  }
  input.value = before.text;
  before = null;
  update();
  grow();
  input.focus();
}

function grow() {  // where field-sizing is not known
  if (CSS.supports("field-sizing", "content")) return;
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
}

/** The field, unless that would bring up a keyboard over the page. */
export function focus() {
  if (!matchMedia("(pointer: coarse)").matches) input.focus();
}

export function setUp() {
  $("address").textContent = new URL("v1", document.baseURI).href;
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = input.value.trim();
    if (running || (!text && (model.talks === "chat" || !messages.length))) return;
    input.value = "";
    grow();
    say(text);
  });
  input.addEventListener("input", grow);
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $("composer").requestSubmit();
    }
    if (event.key === "Escape" && before) cancelEdit();
  });
  $("stop").addEventListener("click", () => { running?.abort(); input.focus(); });
  $("cancel-edit").addEventListener("click", cancelEdit);
  $("new-chat").addEventListener("click", () => {
    running?.abort();
    before = null;
    remove(0);
    notice("");
    update();
    input.focus();
  });
  update();
}

/** What the server says of its model. Throws ApiError. */
export async function askModel() {
  const news = await getJson("page/model");
  if (news.name) setModel(news);
  return news;
}
