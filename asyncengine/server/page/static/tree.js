// A conversation as data, {id, title, time, tip, settings, nodes}, and checks of files and records.
// A node {id, parent, role, text, reasoning, calls, end} follows its parent; `tip` ends the branch that is shown.

export const FIELDS = ["system", "temperature", "top_p", "max_tokens", "seed", "stop", "tools"];

const newId = () => Array.from(crypto.getRandomValues(new Uint32Array(3)), (n) => n.toString(36)).join("");

export const create = (settings) => ({ id: newId(), title: "", time: 0, tip: "", settings, nodes: [] });

export function add(chat, role, parent, text = "") {
  const node = { id: newId(), parent, role, text, reasoning: "", calls: [], end: "" };
  chat.nodes.push(node);
  chat.tip = node.id;
  chat.title ||= /.{0,60}/u.exec(text)[0];
  return node;
}

export function path(chat, tip = chat.tip) {
  const nodes = new Map(chat.nodes.map((node) => [node.id, node])), found = [];
  for (let node = nodes.get(tip); node; node = nodes.get(node.parent)) found.push(node);
  return found.reverse();
}

export const versions = (chat, node) => chat.nodes.filter(({ parent }) => parent === node.parent);

/** Shows a version, and what followed it last. */
export function choose(chat, node) {
  for (; node; node = chat.nodes.findLast(({ parent }) => parent === chat.tip)) chat.tip = node.id;
}

/** The id that a new message follows: the last whole answer. */
export const ground = (chat) => path(chat).findLast(({ role, end }) => role !== "user" && end !== "broken")?.id ?? "";

export const isEmpty = ({ text, reasoning, calls }) => !text && !reasoning && !calls.length;

/** Takes in a choice of a stream. Whether it had any output. */
export function take(node, { delta = {}, text = "", finish_reason }) {
  const said = delta.content ?? text, thought = delta.reasoning_content ?? delta.reasoning ?? "", calls = delta.tool_calls ?? [];
  node.text += said;
  node.reasoning += thought;
  for (const { index, function: part } of calls) {
    let call = node.calls.find((other) => other.index === index);
    if (!call) node.calls.push(call = { index, name: "", args: "" });
    call.name += part?.name ?? "";
    call.args += part?.arguments ?? "";
  }
  node.end = finish_reason || node.end;
  return Boolean(said || thought || calls.length);
}

/** What a reader would not see of an answer's end. */
export function note({ text, reasoning, calls, end }) {
  const where = text || calls.length ? "" : reasoning ? " in the middle of its reasoning" : " before it began";
  if (end === "broken") return "The answer broke off here. The next message goes without it.";
  if (end === "content_filter") return "A content filter ended the answer.";
  if (end === "timeout") return `The limit of time ended the answer${where}.`;
  if (end === "length" && where) return `The limit of tokens ended the answer${where}. See Max tokens in Settings.`;
  if (end === "stopped" && where) return `You stopped the answer${where}.`;
  if (calls.length) return "The model asks for a tool. This page runs none: answer in its place.";
  return where && (reasoning ? "The model ended after its reasoning, without an answer." : "The model answered with no text.");
}

/** Indents JSON, and changes no number of it. Other text stays. */
export function pretty(json) {
  try {
    JSON.parse(json);
  } catch {
    return json;
  }
  let depth = 0;
  const line = (by) => `\n${"  ".repeat(depth += by)}`;
  return json.replace(/"(?:[^"\\]|\\.)*"|\s+|\{\s*\}|\[\s*\]|[{}[\],:]/g, (part) => {
    if ("{[".includes(part)) return part + line(1);
    if ("}]".includes(part)) return line(-1) + part;
    if (part === ",") return part + line(0);
    return part === ":" ? ": " : part[0] === '"' ? part : part.replace(/\s/g, "");
  });
}

export const sent = ({ unsent, end }) => !unsent && end !== "broken";

const asText = ({ name, args }) => `{"name": ${JSON.stringify(name)}, "arguments": ${args || "{}"}}`;

/** Calls go as text, because no tool answers them. */
export const messages = (nodes) => nodes.filter(sent).map(({ role, text, calls }) => (
  { role, content: [text, ...calls.map(asText)].filter(Boolean).join("\n") }));

/** For a model without a chat template. */
export const joined = (nodes) => nodes.filter(sent).reduce((all, { text, role }) => (
  all + (all && text && role === "user" && !/\s$/.test(all) && !/^\s/.test(text) ? "\n\n" : "") + text), "");

/** The place of the first user's message from which on the rest `fits`, or nothing. */
export async function firstThat(nodes, fits) {
  for (let i = 1; i < nodes.length; ++i) if (nodes[i].role === "user" && await fits(nodes.slice(i))) return i;
}

/** Adds what another tab has added. */
export function merge(chat, other) {
  const mine = new Map(chat.nodes.map((node) => [node.id, node]));
  for (const node of other.nodes) {
    const same = mine.get(node.id);
    if (!same) chat.nodes.push(node);
    else if (node.end && !same.end) Object.assign(same, node, { parent: same.parent });
  }
}

function check(value, right, problem) {
  if (!right) throw new Error(problem);
  return value;
}

const string = (value, most = 4e6) => check(value, typeof value === "string" && value.length <= most, "a text is wrong");
const list = (value, most) => check(value, Array.isArray(value) && value.length <= most, "a list is wrong");

function cleanNode({ id, parent, role, text, reasoning = "", calls = [], end = "", figures = "", seconds, unsent }, known) {
  check(role, role === "user" || role === "assistant", "a role is unknown");
  check(id, !known.has(string(id, 99)) && known.has(parent), "a turn follows none");
  known.add(id);
  return {
    id, parent, role, text: string(text), reasoning: string(reasoning), end: string(end, 99), figures: string(figures, 999),
    calls: list(calls, 128).map(({ name, args }, index) => ({ index, name: string(name), args: string(args) })),
    seconds: Number(seconds) || 0, unsent: unsent === true,
  };
}

/** A copy of the known fields. Throws an Error that says what is wrong. */
export function clean({ id, title, time, tip, settings, nodes }) {
  const known = new Set([""]);
  const chat = { id: string(id, 99), title: string(title, 999), time: Number(time) || 0, tip: string(tip, 99), settings: {} };
  for (const name of FIELDS) chat.settings[name] = string(settings?.[name] ?? "");
  chat.nodes = list(nodes, 10_000).map((node) => cleanNode(node, known));
  return check(chat, known.has(tip), "a turn is missing");
}

/** The conversations of a file, under new ids. Throws an Error. */
export const read = (text) => list(JSON.parse(text)?.conversations, 5000).map((raw) => ({ ...clean(raw), id: newId() }));

export function matches({ title, nodes }, words) {
  const all = [title, ...nodes.map(({ text }) => text)].join("\n").toLowerCase();
  return words.toLowerCase().split(/\s+/).every((word) => all.includes(word));
}
