// The page's logic without a browser: node --test tests/server/page_logic.mjs
import assert from "node:assert/strict";
import { test } from "node:test";

const at = (name) => import(new URL(`../../asyncengine/server/page/static/${name}`, import.meta.url));
const tree = await at("tree.js"), store = await at("store.js");

/** Says each text and answers it "re: TEXT". */
function talk(chat, ...texts) {
  for (const text of texts) {
    const user = tree.add(chat, "user", tree.ground(chat), text);
    Object.assign(tree.add(chat, "assistant", user.id, ""), { text: `re: ${text}`, end: "stop" });
  }
  return chat;
}
const texts = (chat) => tree.path(chat).map(({ text }) => text);

test("branches", () => {
  const chat = talk(tree.create({}), "a", "b", "c");
  assert.equal(chat.title, "a");
  const [, , b] = tree.path(chat);
  const other = tree.add(chat, "user", b.parent, "B");
  assert.deepEqual(texts(chat), ["a", "re: a", "B"]);
  assert.deepEqual(tree.versions(chat, other), [b, other]);
  tree.choose(chat, b);
  assert.deepEqual(texts(chat), ["a", "re: a", "b", "re: b", "c", "re: c"]);
  assert.equal(tree.ground(chat), chat.tip);
});

test("what failed stays beside what follows", () => {
  const chat = talk(tree.create({}), "a");
  const good = chat.tip, lost = tree.add(chat, "user", good, "lost");
  assert.equal(tree.ground(chat), good);
  tree.add(chat, "assistant", lost.id).end = "broken";
  assert.equal(tree.ground(chat), good);
  assert.deepEqual(tree.messages(tree.path(chat)).map(({ content }) => content), ["a", "re: a", "lost"]);
  assert.equal(tree.ground(tree.create({})), "");
});

test("a stream's events make a node", () => {
  const node = tree.add(tree.create({}), "assistant", "");
  const call = (index, name, args) => ({ delta: { tool_calls: [{ index, function: { name, arguments: args } }] } });
  assert.equal(tree.take(node, { delta: { role: "assistant", content: "" } }), false);
  for (const choice of [
    { delta: { reasoning_content: "hm", reasoning: "hm" } }, { delta: { reasoning: "!" } }, { delta: { content: "Hi" } },
    call(0, "f", '{"a"'), call(1, "g", ""), call(0, undefined, ":1}"), { text: " all", finish_reason: "stop" },
  ]) assert.equal(tree.take(node, choice), true);
  assert.deepEqual([node.text, node.reasoning, node.end], ["Hi all", "hm!", "stop"]);
  assert.deepEqual(node.calls, [{ index: 0, name: "f", args: '{"a":1}' }, { index: 1, name: "g", args: "" }]);
  const [{ content }] = tree.messages([node]);
  assert.equal(content, 'Hi all\n{"name": "f", "arguments": {"a":1}}\n{"name": "g", "arguments": {}}');
});

test("an end that nobody would see is said", () => {
  const node = { text: "", reasoning: "", calls: [], end: "stop" };
  const said = (fields) => tree.note({ ...node, ...fields });
  assert.equal(said({ text: "a" }), "");
  assert.equal(said({ text: "a", end: "length" }), "");
  assert.match(said({}), /no text/);
  assert.match(said({ reasoning: "a" }), /without an answer/);
  assert.match(said({ reasoning: "a", end: "length" }), /limit of tokens .*reasoning/);
  assert.match(said({ calls: [{}] }), /tool/);
  assert.match(said({ text: "a", end: "broken" }), /broke off/);
  for (const end of ["content_filter", "timeout", "stopped"]) assert.match(said({ end }), /ended|stopped/);
});

test("JSON is indented and else unchanged", () => {
  assert.equal(tree.pretty('{"a":[1,{}],"b" : "{,:\\"}"}'), '{\n  "a": [\n    1,\n    {}\n  ],\n  "b": "{,:\\"}"\n}');
  assert.match(tree.pretty('{"a": 12345678901234567890.10}'), /12345678901234567890\.10/);
  for (const text of ["{", "", "[1, ]"]) assert.equal(tree.pretty(text), text);
  for (const text of ['{"a":[1,{"b":[]}],"c":"\\\\"}', "[[],[[]],{}]", "-1e5", '"a b"']) {
    assert.equal(tree.pretty(tree.pretty(text)), tree.pretty(text));
    assert.deepEqual(JSON.parse(tree.pretty(text)), JSON.parse(text));
  }
});

test("what is left out", async () => {
  const nodes = tree.path(talk(tree.create({}), "a", "b", "c"));
  assert.equal(await tree.firstThat(nodes, (left) => left.length <= 4), 2);
  assert.equal(await tree.firstThat(nodes, async (left) => left.length <= 2), 4);
  assert.equal(await tree.firstThat(nodes, () => false), undefined);
  nodes[0].unsent = nodes[1].unsent = true;
  assert.deepEqual(tree.messages(nodes).map(({ content }) => content), ["b", "re: b", "c", "re: c"]);
  assert.equal(tree.joined([{ role: "user", text: "Once" }, { text: " upon" }, { role: "user", text: "Then" }]), "Once upon\n\nThen");
});

test("two tabs add to one conversation", () => {
  const one = talk(tree.create({}), "a"), two = structuredClone(one);
  talk(one, "b");
  talk(two, "c");
  tree.merge(one, two);
  assert.deepEqual(texts(one), ["a", "re: a", "b", "re: b"]);
  assert.equal(one.nodes.length, 6);
  assert.equal(tree.versions(one, tree.path(one)[2]).length, 2);
  const part = { ...one.nodes[5], text: "whole", end: "stop" };
  one.nodes[5].end = "";
  tree.merge(one, { nodes: [{ ...part, parent: "elsewhere" }] });
  assert.deepEqual(one.nodes[5], part);
});

test("records and files are checked", () => {
  const chat = talk(tree.create({ system: "Be kind", key: "secret" }), "a", "b");
  const file = (change) => {
    const copy = structuredClone(chat);
    change(copy);
    return JSON.stringify({ conversations: [copy] });
  };
  const [read] = tree.read(file(() => {}));
  assert.notEqual(read.id, chat.id);
  assert.deepEqual(texts(read), texts(chat));
  assert.equal(read.settings.system, "Be kind");
  assert.equal("key" in read.settings, false);
  for (const hostile of [
    (c) => { c.nodes[0].parent = c.nodes[3].id; },  // in a circle
    (c) => { c.nodes[1].parent = "nothing"; },
    (c) => { c.nodes[1].id = c.nodes[0].id; },
    (c) => { c.nodes[1].role = "system"; },
    (c) => { c.nodes[1].text = { toString: "x" }; },
    (c) => { c.nodes[1].calls = [{ name: 1, args: "" }]; },
    (c) => { c.nodes[1] = null; },
    (c) => { c.nodes = Array(10_001).fill(c.nodes[0]); },
    (c) => { c.tip = "nothing"; },
    (c) => { c.title = "x".repeat(1000); },
    (c) => { c.settings.system = ["x"]; },
    (c) => { c.id = null; },
  ]) assert.throws(() => tree.read(file(hostile)));
  for (const text of ["", "{", "null", "[]", "{}", '{"conversations":{}}', '{"conversations":[[]]}', '{"conversations":["x"]}']) {
    assert.throws(() => tree.read(text));
  }
  const [proto] = tree.read(file((c) => { c.nodes[0].id = c.nodes[1].parent = "__proto__"; c.extra = "gone"; }));
  assert.deepEqual(texts(proto), texts(chat));
  assert.equal("extra" in proto, false);
  assert.equal({}.text, undefined);
});

test("search", () => {
  const chat = talk(tree.create({}), "A story about Foxes");
  for (const words of ["", "fox", "STORY foxes", "re:"]) assert.ok(tree.matches(chat, words));
  assert.equal(tree.matches(chat, "fox bear"), false);
});

/** Storage of so many characters, as browsers have it. */
class Area {
  constructor(room) {
    Object.defineProperty(this, "room", { value: room, writable: true });
  }
  getItem(name) { return Object.hasOwn(this, name) ? this[name] : null; }
  removeItem(name) { delete this[name]; }
  setItem(name, value) {
    if (value.length > this.room) throw new DOMException("", "QuotaExceededError");
    this[name] = value;
  }
}

test("storage", () => {
  const area = globalThis.localStorage = new Area(1e6);
  const chat = talk(tree.create({}), "a");
  store.save(chat);
  assert.equal(store.problem, "");
  assert.deepEqual(texts(store.get(chat.id)), texts(chat));
  const other = talk(store.get(chat.id), "elsewhere");  // in another tab
  area.setItem(`asyncengine.chat.${chat.id}`, JSON.stringify(other));
  talk(chat, "here");
  tree.add(chat, "assistant", chat.tip);  // under way
  store.save(chat);
  assert.equal(store.get(chat.id).nodes.length, 6);
  area.setItem("asyncengine.chat.bad", "{");
  assert.deepEqual([store.all().chats.length, store.all().unread], [1, 1]);
  area.room = 10;
  const large = talk(tree.create({}), "large");
  store.save(large);
  assert.match(store.problem, /full/);
  assert.deepEqual(store.all().chats.map(({ title }) => title).sort(), ["a", "large"]);
  area.room = 1e6;
  store.save(large);
  assert.equal(store.problem, "");
  store.remove(large.id);
  assert.equal(store.get(large.id), null);
  Object.defineProperty(globalThis, "localStorage", { get() { throw new DOMException("", "SecurityError"); } });
  store.save(large);
  assert.match(store.problem, /keeps nothing/);
  assert.deepEqual(texts(store.get(large.id)), ["large", "re: large"]);
});
