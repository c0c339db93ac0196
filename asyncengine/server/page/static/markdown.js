// Markdown as elements. Text is untrusted: it only ever becomes text nodes, links lead to http, https and mailto alone, an
// image becomes a link, and of HTML a <br> alone is more than text.
import { highlight } from "./highlight.js";
import { math } from "./math.js";

/** Shows `text` in `container`. What has not changed since the last call keeps its elements. */
export function render(container, text) {
  const blocks = split(text.replace(/\r\n?/g, "\n").split("\n"));
  const shown = container.blocks ?? [];
  const names = blocks.map((block) => JSON.stringify(block));
  let same = 0;
  while (same < names.length && shown[same] === names[same]) ++same;
  patch(container, blocks.slice(same).map((block) => element(block, 0)), same);
  container.blocks = names;
}

/** Makes the children of `node` from the one at `at` on equal to `fresh`, and leaves those alone that are so already. */
function patch(node, fresh, at = 0) {
  for (const news of fresh) {
    const old = node.childNodes[at++];
    if (!old) node.append(news);
    else if (old.isEqualNode(news)) continue;
    else if (old.cloneNode().isEqualNode(news.cloneNode()) && news.localName) patch(old, [...news.childNodes]);
    else old.replaceWith(news);
  }
  while (node.childNodes.length > at) node.lastChild.remove();
}

const FENCE = /^ *(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*))?$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const BULLET = /^( {0,3})([-*+])( {1,4})(?=\S)/;
const NUMBER = /^( {0,3})(\d{1,9})[.)]( {1,4})(?=\S)/;
const DIVIDER = /^[|:\s-]*-[|:\s-]*$/;
const FORMULA = /^ *(\$\$|\\\[)/;
const MOST_NESTING = 8, MOST_LINES = 200, MOST_MISSING = 50;  // levels; lines of a formula; cells that a row lacks

function split(lines) {
  const blocks = [];
  for (let i = 0; i < lines.length;) {
    if (!lines[i].trim()) { ++i; continue; }
    const [block, end] = take(lines, i);
    blocks.push(block);
    i = end;
  }
  return blocks;
}

/** The block that begins at line i, and the line behind it. */
function take(lines, i) {
  const line = lines[i];
  const upTo = (ends, from = i + 1) => {
    while (from < lines.length && !ends(lines[from], from)) ++from;
    return from;
  };
  let match = FENCE.exec(line);
  if (match) {
    const close = new RegExp(`^ *${match[1]}${match[1][0]}*\\s*$`), end = upTo((l) => close.test(l));
    const inside = lines.slice(i + 1, end).map((l) => l.slice(Math.min(leading(l), leading(line))));
    return [{ kind: "code", info: match[2].trim().split(/\s/)[0], lines: inside }, end + 1];
  }
  match = HEADING.exec(line);
  if (match) return [{ kind: `h${match[1].length}`, lines: [(match[2] ?? "").trim().replace(/(^|\s)#+$/, "")] }, i + 1];
  if (RULE.test(line)) return [{ kind: "hr", lines: [] }, i + 1];
  if (QUOTE.test(line)) {
    const end = upTo((l) => !QUOTE.test(l));
    return [{ kind: "blockquote", lines: lines.slice(i, end).map((l) => l.replace(QUOTE, "")) }, end];
  }
  if (BULLET.test(line)) return takeList(lines, i, BULLET, "ul");
  if (NUMBER.test(line)) return takeList(lines, i, NUMBER, "ol");
  const formula = FORMULA.test(line) && takeFormula(lines, i);
  if (formula) return formula;
  if (isTable(lines, i)) {
    const end = upTo((l) => !l.includes("|"));
    return [{ kind: "table", lines: lines.slice(i, end) }, end];
  }
  const end = upTo((l, at) => !l.trim() || interrupts(l) || isTable(lines, at));
  return [{ kind: "p", lines: lines.slice(i, end) }, end];
}

const interrupts = (line) => [FENCE, HEADING, RULE, QUOTE, BULLET, NUMBER, FORMULA].some((start) => start.test(line));
const leading = (line) => line.length - line.trimStart().length;

/** Whether a table begins at line i. The beginning of one, at the end of what has come so far, is one too. */
function isTable(lines, i) {
  const [head, divider, more] = lines.slice(i, i + 3);
  if (!head.includes("|")) return false;
  const width = cells(head).length;
  return DIVIDER.test(divider) && cells(divider).length === width ||
    more === undefined && head.trim()[0] === "|" && width > 1 && /^[|:\s-]*$/.test(divider ?? "");
}

/** A formula in lines of its own. One that has not ended yet, at the end of what has come so far, shows its TeX. */
function takeFormula(lines, i) {
  const start = lines[i].trim(), close = start[0] === "$" ? "$$" : "\\]", taken = [start.slice(2)];
  for (let end = i + 1; end - i < MOST_LINES; ++end) {
    const at = taken.at(-1).indexOf(close), rest = taken.at(-1).slice(at + 2).trim();
    if (at >= 0) {
      if (!/^[.,;:]?$/.test(rest)) return null;
      taken.push(taken.pop().slice(0, at) + rest);
      return [{ kind: "formula", info: "whole", lines: taken }, end];
    }
    if (end >= lines.length) return [{ kind: "formula", lines: taken }, end];
    if (!lines[end].trim()) return null;
    taken.push(lines[end]);
  }
  return null;
}

function takeList(lines, i, marker, kind) {
  const first = marker.exec(lines[i]), indent = Math.min(first[0].length, 2);
  let end = i + 1;
  for (let next = end; next < lines.length; end = ++next) {
    while (next < lines.length && !lines[next].trim()) ++next;  // to the next line with text
    const line = lines[next] ?? "";
    if (!(marker.test(line) || (line && leading(line) >= indent) || (next === end && line && !interrupts(line)))) break;
  }
  return [{ kind, info: kind === "ol" ? first[2] : "", lines: lines.slice(i, end) }, end];
}

export function make(tag, className = "", ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

function fill(node, children) {  // of which there may be more than a call has arguments
  for (const child of children) node.append(child);
  return node;
}

/** A box that scrolls what is wider than the page, by the keyboard too. */
function wide(tag, className, ...children) {
  const node = make(tag, className, ...children);
  node.tabIndex = 0;
  return node;
}

function element(block, depth) {
  const { kind, info, lines } = block, text = lines.join("\n");
  if (kind === "code") return codeBlock(info, text);
  if (kind === "table") return wide("div", "wide", table(lines));
  if (kind === "formula") return wide("div", "wide", info ? formula(text, true) : make("code", "", text));
  if (kind === "ul" || kind === "ol") return list(block, depth);
  if (kind === "blockquote") return append(make(kind), lines, depth);
  return inline(make(kind), lines.map((line) => line.trim()).join("\n"));
}

const formula = (tex, display) => math(tex, display) ?? make("code", "", tex);

function append(node, lines, depth, blocks = split(lines)) {
  return fill(node, depth < MOST_NESTING ? blocks.map((block) => element(block, depth + 1)) : [lines.join("\n")]);
}

function list({ kind, info, lines }, depth) {
  const node = make(kind);
  if (kind === "ol" && info !== "1") node.start = Number(info);
  const marker = kind === "ol" ? NUMBER : BULLET;
  const items = [];
  for (const line of lines) {
    const match = marker.exec(line), last = items.at(-1);
    if (match && !(last && match[1].length >= last.indent)) {
      items.push({ indent: match[0].length, lines: [line.slice(match[0].length)] });
    } else last.lines.push(line.slice(Math.min(leading(line), last.indent)));
  }
  for (const { lines: inside } of items) {
    const li = node.appendChild(make("li"));
    const task = /^\[([ xX])\]\s+/.exec(inside[0]);
    if (task) inside[0] = inside[0].slice(task[0].length);
    const blocks = split(inside);
    if (blocks[0]?.kind === "p" && (task || !inside.includes(""))) {  // a tight list has no paragraphs
      inline(task ? li.appendChild(checkbox(task[1])) : li, blocks.shift().lines.join("\n"));
    }
    append(li, inside, depth, blocks);
  }
  return node;
}

function checkbox(mark) {
  const box = make("input");
  Object.assign(box, { type: "checkbox", disabled: true, defaultChecked: mark !== " " });
  return make("label", "task", box);
}

/** The cells of a table's row. A pipe in code or behind a backslash parts none. */
function cells(line) {
  const found = [""], missing = new Set();
  const row = line.trim().replace(/^\|/, "");
  for (let i = 0, end; i < row.length; i = end) {
    end = i + (row.startsWith("\\|", i) ? 2 : row[i] === "`" ? codeLength(row, i, missing) : 1);
    if (row[i] === "|") found.push("");
    else found[found.length - 1] += row.slice(i, end).replaceAll("\\|", "|");
  }
  if (found.length > 1 && !found.at(-1).trim()) found.pop();
  return found.map((cell) => cell.trim());
}

function table([head, divider = "", ...rows]) {
  const columns = cells(divider).map((cell) => (!/.:$/.test(cell) ? "" : cell[0] === ":" ? "center" : "right"));
  const titles = cells(head);
  const row = (tag, texts) => fill(make("tr"), titles.slice(0, Math.max(texts.length, MOST_MISSING))
    .map((_, i) => inline(make(tag, columns[i]), texts[i] ?? "")));
  return make("table", "", make("thead", "", row("th", titles)), fill(make("tbody"), rows.map((line) => row("td", cells(line)))));
}

function codeBlock(info, text) {
  const code = make("code", "", ...highlight(text, info).map(([kind, part]) => (kind ? make("span", kind, part) : part)));
  const head = make("div", "code-head", make("span", "", info || "text"), copyButton(() => code.textContent, "Copy code"));
  return make("div", "code", head, wide("pre", "", code));
}

/** A button that copies what `text` answers, and says so. */
export function copyButton(text, name) {
  const button = make("button", "", name);
  button.type = "button";
  button.addEventListener("click", async () => {
    button.textContent = (await copy(text())) ? "Copied" : "Not copied";
    setTimeout(() => { button.textContent = name; }, 1500);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);  // only where the page came over https or from this machine
    return true;
  } catch {
    const area = make("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }
}

const SPECIAL = /[\\`*_~[\n!<$]|https?:\/\//g;
const WORD = /[\p{L}\p{N}]/u, SIGN = /[\p{P}\p{S}]/u;

/** Appends text with emphasis, code, formulas and links to `node`. */
function inline(node, text, depth = 0) {
  const find = new RegExp(SPECIAL);
  const missing = new Set();  // closers that do not come any more
  const open = [{ node }];  // what has begun: the innermost is last
  const add = (...parts) => open.at(-1).node.append(...parts);
  let from = 0;
  for (let match; depth <= MOST_NESTING && (match = find.exec(text));) {
    const at = match.index;
    const found = special(text, at, depth, missing);
    const marks = /[*_~]/.test(text[at]) ? /^(.)\1*/.exec(text.slice(at, at + 99))[0] : "";
    find.lastIndex = found ? found.end : at + (marks.length || match[0].length);
    if (!found && !marks) continue;
    if (at > from) add(text.slice(from, at));
    from = find.lastIndex;
    if (found) add(found.node);
    else emphasis(open, marks, text[at - 1] ?? " ", text[from] ?? " ");
  }
  if (from < text.length) add(text.slice(from));
  give(open, 1);
  return node;
}

/** Closes all but `size` of what is open as the plain text that it was. */
function give(open, size) {
  while (open.length > size) {
    const { marks, node } = open.pop();
    open.at(-1).node.append(marks, node);
  }
}

/** A run of marks closes what is open, or opens, as CommonMark has it; Chinese and the like need no spaces around it. */
function emphasis(open, marks, before, after) {
  const [mark] = marks;
  const begins = /\S/.test(after) && !(SIGN.test(after) && /\w/.test(before));
  const ends = /\S/.test(before) && !(SIGN.test(before) && /\w/.test(after));
  const opens = begins && (mark !== "_" || !ends || SIGN.test(before)) && (mark !== "~" || marks.length === 2);
  const closes = ends && (mark !== "_" || !begins || SIGN.test(after)) && (mark !== "~" || marks.length === 2);
  let left = marks;
  while (closes && left) {
    const size = open.findLastIndex((o) => o.mark === mark && !((o.both || opens) && (o.length + marks.length) % 3 === 0 && marks.length % 3));
    if (size < 0) break;
    give(open, size + 1);
    const last = open.at(-1), used = Math.min(2, last.marks.length, left.length);
    const node = make(mark === "~" ? "del" : used > 1 ? "strong" : "em", "", last.node);
    last.marks = last.marks.slice(used);
    left = left.slice(used);
    if (!last.marks) open.pop();
    open.at(-1).node.append(node);
  }
  if (left && opens && open.length <= MOST_NESTING) {
    open.push({ mark, marks: left, length: marks.length, both: closes, node: document.createDocumentFragment() });
  } else open.at(-1).node.append(left);
}

/** What begins at a character that may mean something: its node and its end; null for nothing. */
function special(text, at, depth, missing) {
  const c = text[at], next = text[at + 1] ?? "";
  const between = (close, start) => {
    const end = search(text, close, at + start, missing);
    return end > at + start ? text.slice(at + start, end) : "";
  };
  if (c === "\n") return { node: make("br"), end: at + 1 };
  if (c === "\\" && /[([]/.test(next)) {
    const tex = between(next === "(" ? "\\)" : "\\]", 2);
    if (tex) return { node: formula(tex, next === "["), end: at + tex.length + 4 };
  }
  if (c === "\\") return /[\n!-/:-@[-`{-~]/.test(next) ? { node: next === "\n" ? make("br") : next, end: at + 2 } : null;
  if (c === "`") {
    const end = at + codeLength(text, at, missing), [, inside] = /^`+([^`][^]*?)`+$/.exec(text.slice(at, end)) ?? [];
    return { node: inside ? make("code", "", inside.replaceAll("\n", " ").trim()) : text.slice(at, end), end };
  }
  if (c === "$") {
    const size = next === "$" ? 2 : 1, tex = between("$".repeat(size), size), end = at + tex.length + 2 * size;
    const fits = tex && (size > 1 || !/^\s|[\s\\]$/.test(tex) && !/\d/.test(text[end] ?? ""));
    return fits ? { node: formula(tex, size > 1), end } : size > 1 ? { node: "$$", end: at + 2 } : null;
  }
  if (c === "<") {
    const [whole, address] = /^<(?:br ?\/?|([a-z]+:[^\s<>]+))>/i.exec(text.slice(at, at + 2048)) ?? [];
    return !whole ? null : !address ? { node: make("br"), end: at + whole.length } : anchored(address, address, at + whole.length);
  }
  if (c === "[" || (c === "!" && next === "[")) return link(text, at, depth);
  return c === "h" && !WORD.test(text[at - 1] ?? "") ? bareLink(text, at) : null;
}

/** Where `what` comes next; each that is not there is looked for once. */
function search(text, what, from, missing) {
  const at = missing.has(what) ? -1 : text.indexOf(what, from);
  if (at < 0) missing.add(what);
  return at;
}

/** Length of the code at a backtick with both of its fences; of the backticks alone where no such fence follows. */
function codeLength(text, at, missing) {
  const run = (from) => {
    let end = from;
    while (text[end] === "`") ++end;
    return end - from;
  };
  const size = run(at), fence = "`".repeat(size);
  for (let end = at + size; (end = search(text, fence, end, missing)) >= 0;) {
    const found = run(end);
    end += found;
    if (found === size) return end - at;
  }
  return size;
}

const LINK = /!?\[((?:[^[\]\\]|\\[^]|\[[^[\]]*\])*)\]\(\s?(<[^<>\n]*>|[^\s()]*(?:\([^\s()]*\)[^\s()]*)*)(?:\s+(?:"[^"]*"|'[^']*'))?\s?\)/y;

function link(text, at, depth) {
  LINK.lastIndex = at;
  const [whole, words, target] = LINK.exec(text) ?? [""];
  const found = whole && anchored(target.replace(/^<|>$/g, ""), words ? "" : target, at + whole.length);
  if (!found) return null;
  inline(found.node, words, depth + 1);
  for (const nested of found.node.querySelectorAll("a")) nested.replaceWith(...nested.childNodes);
  return found;
}

function bareLink(text, at) {
  const [address] = /^(?:[^\s<>"'`()]|\([^\s<>"'`()]*\))+/.exec(text.slice(at, at + 2048));
  const end = address.replace(/[.,;:!?\]*_]+$/, "");
  return anchored(end, end, at + end.length);
}

/** A link around a text; null for an address that is none of the web or of mail. */
function anchored(address, text, end) {
  const url = URL.canParse(address) ? new URL(address) : null;
  if (!/^(https?|mailto):$/.test(url?.protocol)) return null;
  const node = make("a", "", text);
  Object.assign(node, { href: url.href, rel: "noopener noreferrer nofollow", target: "_blank" });
  return { node, end };
}
