// The open conversation: sending, streaming, stopping, saying it differently, and what helps after a failure.
import { getJson, postJson, stream } from "./api.js";
import { make } from "./markdown.js";
import { $, build, button, on, show, showFoot } from "./message.js";
import * as settings from "./settings.js";
import * as store from "./store.js";
import * as tree from "./tree.js";

const input = $("input"), scroll = $("scroll");
const STARTERS = {
  chat: ["What is a KV cache? Two sentences.", "Write a haiku about an event loop."],
  small: ["Tell me a story about a fox.", "Tell me a tale of two friends."],
  text: ["Once upon a time", "Dear diary,"],
  tokens: [],
};
const TEXT_TOKENS = 200, OPEN = "asyncengine.open";

let model = { name: "", talks: "chat" };
export let chat = tree.create(settings.values());
let shown = [];  // views of the turns
let running = null;  // the AbortController of the answer under way, with its node
let editing = null;  // {node, draft}: what the next message replaces, and what the field had before
let failure = null;  // the error of the last answer

const talksChat = () => model.talks === "chat";

function setModel(news) {
  model = news;
  const { name, num_parameters: size } = model, small = size > 0 && size < 50e6;
  $("welcome-title").textContent = talksChat() ? `Chat with ${name}.` : `${name} continues your text.`;
  $("welcome-text").textContent = model.talks === "tokens"
    ? "This server has no tokenizer. Its API takes and gives token ids."
    : `${small ? "A very small model that writes little stories. " : ""}Write below, or begin with one of these:`;
  document.querySelector("label[for=input]").textContent = input.placeholder = talksChat() ? "Your message" : "Your text";
  input.disabled = $("send").disabled = model.talks === "tokens";
  const starters = STARTERS[talksChat() && small ? "small" : model.talks];
  $("starters").replaceChildren(...starters.map((text) => make("li", "", button(text, () => say(text)))));
  for (const { root } of shown.splice(0)) root.remove();
  update();
}

/** Shows the open branch. */
function update() {
  const nodes = tree.path(chat);
  let same = 0;
  while (same < shown.length && shown[same].node === nodes[same]) ++same;
  for (const { root } of shown.splice(same)) root.remove();
  for (const node of nodes.slice(same)) {
    const view = build(node, model.name);
    $("transcript").append(view.root);
    shown.push(view);
  }
  shown.forEach((view, i) => {
    const { node } = view, versions = tree.versions(chat, node), user = node.role === "user";
    show(view, running?.node === node, !talksChat());
    view.root.classList.toggle("edited", editing?.node === node);
    showFoot(view, versions.indexOf(node), versions.length, running ? null : {
      step: (by) => step(versions[versions.indexOf(node) + by], by),
      edit: user && (() => edit(node)),
      again: user ? !shown[i + 1] && !failure && (() => answer(node.id)) : () => answer(node.parent),
    });
  });
  $("welcome").hidden = shown.length > 0;
  $("new-chat").disabled = !shown.length;
  $("send").hidden = !!running;
  $("stop").hidden = !running;
  $("editing").hidden = !editing;
}

function step(node, by) {
  tree.choose(chat, node);
  settle();
  keep(chat);
  const { foot } = shown.find((view) => view.node === node);
  (foot.querySelector(`[data-step="${by}"]:enabled`) ?? foot.querySelector("[data-step]:enabled")).focus();
}

/** Nothing is edited and nothing failed in the branch that was opened. */
function settle() {
  if (editing) cancelEdit();
  failure = null;
  notice();
  update();
}

function keep(what) {
  if (!what.nodes.length) return;
  const before = store.problem;
  store.save(what);
  if (what === chat) store.remember("sessionStorage", OPEN, chat.id);
  if (store.problem && !before) notice(store.problem);
}

function notice(...inside) {
  $("notice").replaceChildren(...inside);
  $("notice").hidden = !inside.length;
}

const atEnd = () => scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60;
const toEnd = () => { scroll.scrollTop = scroll.scrollHeight; };

/** Path and body of a request that continues `nodes`, or begins with `text`. Throws where the tools are no JSON. */
export function question(text, nodes = tree.path(chat)) {
  const fields = { ...settings.parameters(talksChat()), model: model.name || undefined };
  if (!talksChat()) {
    fields.max_tokens ??= TEXT_TOKENS;
    const room = model.max_model_len - fields.max_tokens;
    if (room > 0) fields.truncate_prompt_tokens = room;  // of a long text its end counts
    return ["v1/completions", { ...fields, prompt: text ?? tree.joined(nodes) }];
  }
  const said = text ? [{ role: "user", content: text }] : tree.messages(nodes);
  if (settings.system()) said.unshift({ role: "system", content: settings.system() });
  return ["v1/chat/completions", { ...fields, messages: said }];
}

function figures(start, first, tokens, end) {
  const seconds = (performance.now() - first) / 1000;
  const speed = tokens > 1 && seconds > 0.02 ? `, ${Math.round((tokens - 1) / seconds).toLocaleString("en")}/s` : "";
  const why = { length: ", cut at the limit", stopped: ", stopped" }[end] ?? "";
  return `${tokens.toLocaleString("en")} tokens${speed}, the first after ${Math.round(first - start)} ms${why}`;
}

/** Asks for an answer to a node. One that fails before it begins leaves what was there. */
async function answer(parent) {
  if (running) return;
  if (editing) cancelEdit();
  failure = null;
  notice();
  keep(chat);
  focus();  // the button that was pressed goes away
  const here = chat, before = chat.tip, node = tree.add(here, "assistant", parent);
  running = Object.assign(new AbortController(), { node });
  update();
  toEnd();
  const error = await receive(node, parent, running.signal), follow = atEnd();
  running = null;
  if (tree.isEmpty(node) && (error || node.end === "stopped")) {
    here.nodes.splice(here.nodes.indexOf(node), 1);
    here.tip = before;
  }
  if (here === chat || store.get(here.id)) keep(here);  // another may be open by now, and this one deleted
  if (here === chat && error) fail(error, parent);
  update();
  if (follow) toEnd();
}

/** Fills a node. Returns the error that ended it. */
async function receive(node, parent, signal) {
  const start = performance.now();
  let first = 0, tokens = 0, events = 0, frame = 0, failed;
  const draw = () => {
    frame = 0;
    const follow = atEnd(), view = shown.find((other) => other.node === node);
    if (view) show(view, true, !talksChat());
    if (follow) toEnd();
  };
  const thought = () => {
    if (node.reasoning) node.seconds ||= Math.max(0.1, (performance.now() - first) / 1000);
  };
  try {
    for await (const { choices, usage } of stream(...question(undefined, tree.path(chat, parent)), signal)) {
      if (choices[0] && tree.take(node, choices[0])) {
        first ||= performance.now();
        ++events;
        if (node.text || node.calls.length) thought();
        frame ||= requestAnimationFrame(draw);
      }
      if (usage) tokens = usage.completion_tokens;
    }
  } catch (error) {
    if (error.name !== "AbortError") failed = error;
    node.end = failed ? "broken" : "stopped";
  }
  cancelAnimationFrame(frame);
  thought();
  if (first) node.figures = figures(start, first, tokens || events, node.end);
  return failed;
}

function say(text) {
  if (running) return;
  let parent = editing ? editing.node.parent : tree.ground(chat);
  if (editing) cancelEdit();
  if (text || talksChat()) parent = tree.add(chat, "user", parent, text).id;
  answer(parent);
}

function fail(error, parent) {
  failure = error;
  const full = /^(context_length|kv_capacity)_exceeded$/.test(error.code);
  const leave = button("Leave out the oldest turns", () => { leave.disabled = true; leaveOut(error, parent); });
  const before = full ? ["The conversation is longer than the model's context. "] : [], after = full ? [leave] : [];
  notice(...before, error.message, ...after, button("Retry", () => answer(parent)));
  if (error.status === 401) settings.openForKey();
}

/** Leaves out as many of the oldest turns as it takes, and asks again. */
async function leaveOut(error, parent) {
  const nodes = tree.path(chat, parent).filter(tree.sent);
  const most = Number(/holds (\d+)/.exec(error.message)?.[1] ?? model.max_model_len);
  const output = settings.parameters().max_tokens ?? Math.min(512, most >> 2);
  const fits = async (left) => {
    const [, body] = question(undefined, left);
    try {
      return (await postJson("tokenize", body)).count + output <= most;
    } catch ({ code }) {  // where the route is not served: a token has three characters
      return code !== "context_length_exceeded" && JSON.stringify(body).length / 3 + output <= most;
    }
  };
  const start = await tree.firstThat(nodes, (left) => failure !== error || fits(left));
  if (failure !== error || running) return;
  if (!start) return notice("Even the last message alone is too long. Shorten it, or lower Max tokens in Settings.");
  for (const node of nodes.slice(0, start)) node.unsent = true;
  answer(parent);
}

function edit(node) {
  editing = { node, draft: editing ? editing.draft : input.value };
  fill(node.text);
}

function cancelEdit() {
  const { draft } = editing;
  editing = null;
  fill(draft);
}

function fill(text) {
  input.value = text;
  grow();
  input.focus();
  update();
}

function grow() {  // where field-sizing is not known
  if (CSS.supports("field-sizing", "content")) return;
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
}

function focus() {
  if (!matchMedia("(pointer: coarse)").matches) input.focus();  // that would bring up a keyboard over the page
}

export function open(other) {
  document.querySelector("dialog[open]")?.close();
  $("show-chat").click();
  if (other?.id === chat.id) return;
  running?.abort();
  chat = other ?? tree.create(settings.values());
  settings.fill(chat.settings);
  settle();
  store.remember("sessionStorage", OPEN, chat.id);
  toEnd();
  focus();
}

export function escape() {
  if (running) running.abort();
  else if (editing) cancelEdit();
}

export function setUp() {
  $("address").textContent = new URL("v1", document.baseURI).href;
  on("composer", "submit", (event) => {
    event.preventDefault();
    const text = input.value.trim();
    if (running || (!text && (talksChat() || !shown.length))) return;
    input.value = "";
    grow();
    say(text);
  });
  on("input", "input", grow);
  on("input", "keydown", (event) => {
    const last = shown.findLast(({ node }) => node.role === "user");
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) $("composer").requestSubmit();
    else if (event.key === "ArrowUp" && !input.value && !running && last) edit(last.node);
    else return;
    event.preventDefault();
  });
  on("stop", "click", () => { escape(); input.focus(); });
  on("cancel-edit", "click", cancelEdit);
  on("new-chat", "click", () => open());
  settings.onEdit((values) => { chat.settings = values; keep(chat); });
  store.onChange((id = chat.id) => {
    const other = !running && id === chat.id && store.get(id);
    if (!other) return;
    tree.merge(chat, other);
    chat.title = other.title;
    update();
  });
  chat = store.get(store.recall("sessionStorage", OPEN)) ?? chat;
  settings.fill(chat.settings);
  update();
  focus();
}

/** What the server says of its model. Throws ApiError. */
export async function askModel() {
  const news = await getJson("page/model");
  if (news.name) setModel(news);
  return news;
}
