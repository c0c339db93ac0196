// Runs the page's scripts of text over cases from standard input, with a document of its own that makes a tree alone.
import { pathToFileURL } from "node:url";

let made = 0;  // nodes, in all

class Node {
  constructor(name, data = "") {
    Object.assign(this, { localName: name, data, childNodes: [], attributes: new Map() });
    if (++made > 2_000_000) throw new Error("too many nodes");
  }
  append(...nodes) {
    for (const node of nodes) {
      if (node.localName === "fragment") this.append(...node.childNodes.splice(0));
      else {
        node.remove?.();
        const child = node instanceof Node ? node : new Node("", String(node));
        child.parent = this;
        this.childNodes.push(child);
      }
    }
  }
  appendChild(node) { this.append(node); return node; }
  remove() { this.replaceWith(); }
  replaceWith(...nodes) {
    const siblings = this.parent?.childNodes ?? [], at = siblings.indexOf(this);
    if (at >= 0) siblings.splice(at, 1, ...nodes);
    for (const node of nodes) node.parent = this.parent;
    this.parent = null;
  }
  get lastChild() { return this.childNodes.at(-1); }
  get textContent() { return this.data + this.childNodes.map((child) => child.textContent).join(""); }
  set textContent(text) { this.childNodes = []; this.append(text); }
  setAttribute(name, value) { this.attributes.set(name, String(value)); }
  set className(value) { this.setAttribute("class", value); }
  set tabIndex(value) { this.setAttribute("tabindex", value); }
  set defaultChecked(value) { if (value) this.setAttribute("checked", ""); }
  cloneNode() { const node = new Node(this.localName, this.data); node.attributes = this.attributes; return node; }
  isEqualNode(other) { return shown(this) === shown(other); }
  querySelectorAll(name) {
    return this.childNodes.flatMap((child) => [...(child.localName === name ? [child] : []), ...child.querySelectorAll(name)]);
  }
  addEventListener() {}
}

for (const name of ["type", "disabled", "href", "rel", "target", "start"]) {
  Object.defineProperty(Node.prototype, name, { set(value) { this.setAttribute(name, value === true ? "" : value); } });
}

const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll("\u00a0", "&nbsp;");

function shown(node) {
  const inside = node.childNodes.map(shown).join("");
  if (!node.localName) return escaped(node.data);
  if (node.localName === "root") return inside;
  const attributes = [...node.attributes].map(([name, value]) => ` ${name}="${value}"`).join("");
  return `<${node.localName}${attributes}>${inside}${/^(br|hr|input)$/.test(node.localName) ? "" : `</${node.localName}>`}`;
}

globalThis.document = {
  createElement: (name) => new Node(name),
  createElementNS: (_, name) => new Node(name),
  createDocumentFragment: () => new Node("fragment"),
};

let input = "";
for await (const chunk of process.stdin) input += chunk;
const { folder, cases } = JSON.parse(input);
const load = (name) => import(pathToFileURL(`${folder}/${name}`));
const [{ render }, { highlight }, { math }] = await Promise.all(["markdown.js", "highlight.js", "math.js"].map(load));

const results = cases.map(({ kind, text, language, pieces }) => {
  made = 0;
  if (kind === "code") return highlight(text, language);
  if (kind === "math") {
    const node = math(text, false);
    return node && node.childNodes.map(shown).join("");
  }
  const root = new Node("root");
  for (let end = pieces ? 1 : text.length; end <= text.length; ++end) render(root, text.slice(0, end));
  return kind === "size" ? [made, root.textContent.length] : shown(root);
});
process.stdout.write(JSON.stringify(results));
