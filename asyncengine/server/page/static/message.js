// A turn as elements: its text, reasoning, calls of tools, and what can be done with it.
import { copyButton, make, render } from "./markdown.js";
import { note, pretty } from "./tree.js";

export const $ = (id) => document.getElementById(id);
export const on = (id, event, act) => $(id).addEventListener(event, act);

export function button(name, act, label = "") {
  const node = Object.assign(make("button", "", name), { type: "button", title: label, onclick: act });
  if (label) node.ariaLabel = label;
  return node;
}

export function build(node, name) {
  const body = make("div", "body"), calls = make("div", "calls"), note = make("p", "note"), foot = make("div", "foot");
  const title = make("h3", "hidden", node.role === "user" ? "You" : name);
  return { node, body, calls, note, foot, root: make("article", `message ${node.role}`, title, body, calls, note, foot) };
}

/** `busy`: it is being written. `plain`: it is no Markdown. */
export function show(view, busy, plain) {
  const { node, root, body } = view;
  root.classList.toggle("unsent", Boolean(node.unsent));
  root.ariaBusy = busy ? "true" : null;  // a screen reader reads it when it is whole
  if (node.role === "user") body.textContent = node.text;
  else if (plain) {
    body.classList.add("plain");
    body.replaceChildren(make("span", "", node.text));
  } else render(body, node.text);
  if (node.role === "user") return;
  if (node.reasoning) showReasoning(view, busy);
  const calls = JSON.stringify(node.calls);
  if (view.drawn !== calls) view.calls.replaceChildren(...node.calls.map(call));
  view.drawn = calls;
  view.note.textContent = busy ? "" : note(node);
}

function showReasoning(view, busy) {
  if (!view.think) {
    view.summary = make("summary");
    view.summary.onclick = () => { view.touched = true; };
    view.thought = make("div", "body");
    view.body.before(view.think = make("details", "think", view.summary, view.thought));
  }
  render(view.thought, view.node.reasoning);
  const { seconds } = view.node, thinking = busy && !seconds;
  view.summary.textContent = thinking ? "Thinking…" : `Thought for ${seconds < 9.95 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  if (!view.touched) view.think.open = thinking;
}

function call({ name, args }) {
  const text = make("pre", "", make("code", "", pretty(args)));
  text.tabIndex = 0;  // the keyboard scrolls it
  return make("div", "code", make("div", "code-head", `Calls ${name}`, copyButton(() => args, "Copy")), text);
}

/** What can be done with a turn, the version at `place` of `count`. */
export function showFoot({ node, foot }, place, count, acts) {
  foot.replaceChildren();
  if (!acts) return;
  const step = (by, sign, name) => {
    const turn = button(sign, () => acts.step(by), name);
    turn.disabled = place + by < 0 || place + by >= count;
    turn.dataset.step = by;
    return turn;
  };
  if (count > 1) foot.append(step(-1, "‹", "Earlier version"), `${place + 1}/${count}`, step(1, "›", "Later version"));
  if (node.role !== "user" && node.text) foot.append(copyButton(() => node.text, "Copy"));
  if (acts.edit) foot.append(button("Edit", acts.edit));
  if (acts.again) foot.append(button(node.role === "user" ? "Retry" : "Regenerate", acts.again));
  if (node.unsent) foot.append(make("span", "figures", "Not sent any more"));
  if (node.figures) foot.append(make("span", "figures", node.figures));
}
