// Markdown as elements. Text is untrusted: it only ever becomes text nodes, links lead to http and https alone, and there
// are no images and no HTML.

/** Shows `text` in `container`. Blocks that have not changed since the last call keep their elements. */
export function render(container, text) {
  const blocks = split(text.replace(/\r\n?/g, "\n").split("\n"));
  const shown = container.blocks ?? [];
  let same = 0;
  while (same < blocks.length && same < shown.length && shown[same] === signature(blocks[same])) ++same;
  while (container.childNodes.length > same) container.lastChild.remove();
  for (const block of blocks.slice(same)) container.append(element(block, 0));
  container.blocks = blocks.map(signature);
}

const signature = (block) => `${block.kind} ${block.info ?? ""}\n${block.lines.join("\n")}`;

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const BULLET = /^( {0,3})([-*+])( {1,4})(?=\S)/;
const NUMBER = /^( {0,3})(\d{1,9})[.)]( {1,4})(?=\S)/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const MOST_NESTING = 8;

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
  let match = FENCE.exec(line);
  if (match) return takeFence(lines, i, match);
  match = HEADING.exec(line);
  if (match) return [{ kind: `h${match[1].length}`, lines: [match[2]] }, i + 1];
  if (RULE.test(line)) return [{ kind: "hr", lines: [] }, i + 1];
  if (QUOTE.test(line)) {
    let end = i;
    while (end < lines.length && QUOTE.test(lines[end])) ++end;
    return [{ kind: "blockquote", lines: lines.slice(i, end).map((l) => l.replace(QUOTE, "")) }, end];
  }
  if (BULLET.test(line)) return takeList(lines, i, BULLET, "ul");
  if (NUMBER.test(line)) return takeList(lines, i, NUMBER, "ol");
  if (line.includes("|") && i + 1 < lines.length && lines[i + 1].includes("-") && DIVIDER.test(lines[i + 1])) {
    let end = i + 2;
    while (end < lines.length && lines[end].includes("|")) ++end;
    return [{ kind: "table", lines: [line, ...lines.slice(i + 2, end)] }, end];
  }
  let end = i + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines[end])) ++end;
  return [{ kind: "p", lines: lines.slice(i, end) }, end];
}

const interrupts = (line) =>
  FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || BULLET.test(line) || NUMBER.test(line);

function takeFence(lines, i, [, fence, info]) {
  const close = new RegExp(`^ {0,3}${fence[0]}{${fence.length},}\\s*$`);
  let end = i + 1;
  while (end < lines.length && !close.test(lines[end])) ++end;
  return [{ kind: "code", info: info.trim().split(/\s/)[0], lines: lines.slice(i + 1, end) }, Math.min(end + 1, lines.length)];
}

function takeList(lines, i, marker, kind) {
  const first = marker.exec(lines[i]);
  const indent = first[0].length;
  let end = i + 1;
  while (end < lines.length) {
    const line = lines[end];
    const blank = !line.trim();
    const next = blank ? lines[end + 1] ?? "" : line;
    if (!(marker.test(next) || (next.trim() && leading(next) >= Math.min(indent, 2)) || (!blank && !interrupts(line)))) break;
    ++end;
  }
  return [{ kind, info: kind === "ol" ? first[2] : "", lines: lines.slice(i, end) }, end];
}

const leading = (line) => line.length - line.trimStart().length;

function element(block, depth) {
  const { kind, lines } = block;
  if (kind === "code") return codeBlock(block);
  if (kind === "table") return table(lines);
  if (kind === "ul" || kind === "ol") return list(block, depth);
  const node = document.createElement(kind);
  if (kind === "blockquote") append(node, split(lines), depth + 1, lines);
  else inline(node, lines.map((line) => line.trim()).join("\n"), 0);
  return node;
}

function append(node, blocks, depth, lines) {
  if (depth > MOST_NESTING) node.append(lines.join("\n"));
  else for (const block of blocks) node.append(element(block, depth));
}

function list({ kind, info, lines }, depth) {
  const node = document.createElement(kind);
  if (kind === "ol" && info !== "1") node.start = Number(info);
  const marker = kind === "ol" ? NUMBER : BULLET;
  const items = [];
  for (const line of lines) {
    const match = marker.exec(line);
    const nested = items.length > 0 && match && match[1].length >= items.at(-1).indent;
    if (match && !nested) items.push({ indent: match[0].length, lines: [line.slice(match[0].length)] });
    else items.at(-1).lines.push(line.slice(Math.min(leading(line), items.at(-1).indent)));
  }
  for (const item of items) {
    const li = document.createElement("li");
    const blocks = split(item.lines);
    if (blocks.length && blocks[0].kind === "p" && !item.lines.includes("")) {  // a tight list has no paragraphs
      inline(li, blocks.shift().lines.join("\n"), 0);
    }
    append(li, blocks, depth + 1, item.lines);
    node.append(li);
  }
  return node;
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((c) => c.trim());

function table([head, ...rows]) {
  const node = document.createElement("table");
  const width = cells(head).length;
  const row = (parent, line, tag) => {
    const tr = parent.appendChild(document.createElement("tr"));
    for (const text of cells(line).slice(0, width)) inline(tr.appendChild(document.createElement(tag)), text, 0);
  };
  row(node.createTHead(), head, "th");
  const body = node.createTBody();
  for (const line of rows) row(body, line, "td");
  return node;
}

function codeBlock({ info, lines }) {
  const node = document.createElement("div");
  node.className = "code";
  const head = node.appendChild(document.createElement("div"));
  head.className = "code-head";
  head.append(span(info || "text"), copyButton(() => lines.join("\n"), "Copy code"));
  const code = node.appendChild(document.createElement("pre")).appendChild(document.createElement("code"));
  code.textContent = lines.join("\n");
  code.parentNode.tabIndex = 0;  // the keyboard scrolls it
  return node;
}

function span(text) {
  const node = document.createElement("span");
  node.textContent = text;
  return node;
}

/** A button that copies what `text` answers, and says so. */
export function copyButton(text, name) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = name;
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
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
  }
}

const PAIRS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const SPECIAL = /[\\`*_~[\n]|https?:\/\//g;
const WORD = /[\p{L}\p{N}]/u;

/** Appends text with emphasis, code and links to `node`. */
function inline(node, text, depth) {
  let from = 0;
  const find = new RegExp(SPECIAL);
  const missing = new Set();  // closers that do not come any more
  for (let match; (match = find.exec(text));) {
    const at = match.index;
    const found = depth > MOST_NESTING ? null : special(text, at, depth, missing);
    if (!found) {
      find.lastIndex = at + match[0].length;
      continue;
    }
    if (at > from) node.append(text.slice(from, at));
    node.append(found.node);
    from = find.lastIndex = found.end;
  }
  if (from < text.length) node.append(text.slice(from));
}

function special(text, at, depth, missing) {
  const c = text[at];
  if (c === "\n") return { node: document.createElement("br"), end: at + 1 };
  if (c === "\\") return /[\\`*_~[\]()#>|.!-]/.test(text[at + 1] ?? "") ? { node: text[at + 1], end: at + 2 } : null;
  if (c === "`") return inlineCode(text, at, missing);
  if (c === "[") return text[at - 1] === "!" ? null : link(text, at, depth, missing);
  if (c === "h") return bareLink(text, at);
  for (const [mark, tag] of PAIRS) {
    if (text.startsWith(mark, at)) return emphasis(text, at, mark, tag, depth, missing);
  }
  return null;
}

function search(text, what, from, missing) {
  if (missing.has(what)) return -1;
  const at = text.indexOf(what, from);
  if (at < 0) missing.add(what);
  return at;
}

function inlineCode(text, at, missing) {
  let length = 1;
  while (text[at + length] === "`") ++length;
  const fence = "`".repeat(length);
  const end = search(text, fence, at + length, missing);
  if (end < 0) return null;
  const node = document.createElement("code");
  node.textContent = text.slice(at + length, end).trim();
  return { node, end: end + length };
}

function emphasis(text, at, mark, tag, depth, missing) {
  const inside = at + mark.length;
  if (!text[inside] || /\s/.test(text[inside])) return null;
  const inWord = mark[0] === "_" && WORD.test(text[at - 1] ?? "");
  const end = inWord ? -1 : search(text, mark, inside + 1, missing);
  if (end < 0 || /\s/.test(text[end - 1])) return null;
  if (mark[0] === "_" && WORD.test(text[end + mark.length] ?? "")) return null;
  const node = document.createElement(tag);
  inline(node, text.slice(inside, end), depth + 1);
  return { node, end: end + mark.length };
}

function link(text, at, depth, missing) {
  const middle = search(text, "](", at, missing);
  if (middle < 0) return null;
  const end = search(text, ")", middle, missing);
  if (end < 0) return null;
  const node = anchor(text.slice(middle + 2, end).trim().split(/\s/)[0]);
  if (!node) return null;
  inline(node, text.slice(at + 1, middle), depth + 1);
  for (const nested of node.querySelectorAll("a")) nested.replaceWith(...nested.childNodes);
  return { node, end: end + 1 };
}

function bareLink(text, at) {
  if (WORD.test(text[at - 1] ?? "")) return null;
  const address = /^https?:\/\/[^\s<>"'`]+/.exec(text.slice(at, at + 2048))[0].replace(/[.,;:!?)\]*_]+$/, "");
  const node = anchor(address);
  if (!node) return null;
  node.append(address);
  return { node, end: at + address.length };
}

/** A link, or null for an address that is not one of the web. */
function anchor(address) {
  let url;
  try {
    url = new URL(address);  // absolute ones only
  } catch {
    return null;
  }
  if (url.protocol !== "http:" && url.protocol !== "https:") return null;
  const node = document.createElement("a");
  node.href = url.href;
  node.rel = "noopener noreferrer nofollow";
  node.target = "_blank";
  return node;
}
