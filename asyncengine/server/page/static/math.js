// TeX formulas as MathML, which browsers draw. An unknown command shows as it was written.

const LONGEST = 4000, DEEPEST = 40;  // characters; groups and commands within each other

const words = (text) => text.split(" ");
const pairs = (text) => new Map(Array.from(text.matchAll(/([a-z]+)(.)/giu), ([, name, value]) => [name, value]));
const GREEK = words("alpha beta gamma delta varepsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho varsigma sigma " +
  "tau upsilon varphi chi psi omega");
const SYMBOLS = pairs(`epsilonϵphiϕvarthetaϑinfty∞partial∂nabla∇emptyset∅varnothing∅hbarℏellℓReℜImℑforall∀exists∃neg¬lnot¬
angle∠prime′pm±mp∓times×div÷cdot⋅ast∗star⋆circ∘oplus⊕otimes⊗odot⊙cap∩cup∪setminus∖wedge∧land∧vee∨lor∨le≤leq≤ge≥geq≥ne≠neq≠
ll≪gg≫approx≈equiv≡sim∼simeq≃cong≅propto∝in∈notin∉subset⊂supset⊃subseteq⊆supseteq⊇mid∣parallel∥perp⟂models⊨vdash⊢bot⊥top⊤to→
rightarrow→leftarrow←gets←leftrightarrow↔Rightarrow⇒Leftarrow⇐Leftrightarrow⇔implies⟹iff⟺mapsto↦longrightarrow⟶uparrow↑
downarrow↓ldots…dots…cdots⋯vdots⋮ddots⋱sum∑prod∏int∫iint∬oint∮bigcup⋃bigcap⋂bigoplus⨁langle⟨rangle⟩lfloor⌊rfloor⌋lceil⌈
rceil⌉vert|lvert|rvert|Vert‖lVert‖rVert‖backslash\\colon:therefore∴`);
const ACCENTS = pairs("hat^widehat^bar¯overline‾vec→overrightarrow→dot˙ddot¨tilde~widetilde~overbrace⏞underbrace⏟underline_");
const SPACES = { ",": ".17em", ":": ".22em", ";": ".28em", "!": "-.17em", " ": ".25em", quad: "1em", qquad: "2em" };
const FENCES = { p: "()", b: "[]", B: "{}", v: "||", V: "‖‖", cases: "{." };
const LIMITED = words("lim max min sup inf limsup liminf argmax argmin det gcd Pr");
const FUNCTIONS = words("arccos arcsin arctan arg cos cosh cot csc deg dim exp ker lg ln log sec sin sinh tan tanh");
const SIZES = words("big Big bigg Bigg");
/** Code points of A and of 0, and the letters that Unicode has elsewhere. */
const FONTS = {
  bb: [0x1d538, 0x1d7d8, "CℂHℍNℕPℙQℚRℝZℤ"], cal: [0x1d49c, 0, "BℬEℰFℱHℋIℐLℒMℳRℛeℯgℊoℴ"], frak: [0x1d504, 0, "CℭHℌIℑRℜZℨ"],
  bf: [0x1d400, 0x1d7ce, ""],
};

function make(tag, children = [], attributes = {}) {
  const node = document.createElementNS("http://www.w3.org/1998/Math/MathML", tag);
  node.append(...children);
  for (const name in attributes) node.setAttribute(name, attributes[name]);
  return node;
}

const mo = (text, attributes) => make("mo", [text], attributes);
const space = (width) => make("mspace", [], { width });
const loud = (node) => Object.assign(node, { limits: true });  // scripts stand above and below it
const fence = (text, size = {}) => mo(text === "." ? "" : text, { stretchy: true, ...size });
const fenced = (open, inside, close) => make("mrow", [fence(open), inside, fence(close)]);

function symbol(c) {
  if (/[\p{L}∞∂∇∅]/u.test(c)) return make("mi", [c], /[Α-Ω∞∂∇∅]/.test(c) ? { mathvariant: "normal" } : {});
  if (/[()[\]{}|‖/⟨⟩⌊⌋⌈⌉]/.test(c)) return mo(c, { stretchy: false, lspace: 0, rspace: 0 });
  return /[∑∏⋃⋂⨁]/.test(c) ? loud(mo(c)) : mo(c);
}

const grid = (rows, name, columns = "") => make("mtable", rows.map((row) => make("mtr", row.map((cell, i) =>
  make("mtd", [cell], { class: columns[i] ?? "" })))), { class: name });

let tokens, at, depth, font;

/** The element for a formula; null where the TeX cannot be read, or is too long or too deep. */
export function math(tex, display) {
  if (tex.length > LONGEST) return null;
  tokens = tex.match(/\d+(\.\d+)?|\\[a-z]+|\\?[^]/giu) ?? [];
  at = depth = 0;
  font = "";
  try {
    const all = rows();
    return make("math", [all[0][1] || all[1] ? grid(all, "align") : all[0][0]], display ? { display: "block" } : {});
  } catch {
    return null;
  }
}

function peek() {
  while (/^\s/.test(tokens[at])) ++at;
  return tokens[at];
}

const ends = (token) => [undefined, "}", "&", "\\\\", "\\right", "\\end"].includes(token);

function take(wanted = peek()) {
  if (peek() !== wanted || wanted === undefined) throw SyntaxError();
  return tokens[at++];
}

/** Rows of cells, up to `end`, which is taken. */
function rows(end) {
  const all = [[]];
  for (;;) {
    all.at(-1).push(row());
    if (peek() === end) break;
    if (peek() !== "&") {
      take("\\\\");
      if (tokens[at] === "[") raw("[", "]");
      if (peek() === end) break;
      all.push([]);
    } else ++at;
  }
  ++at;
  return all;
}

function row(end) {
  const parts = [];
  while (!ends(peek()) && peek() !== end) parts.push(scripted());
  return parts.length === 1 ? parts[0] : make("mrow", parts);
}

function scripted() {
  const base = /^[\^_']$/.test(peek()) ? make("mrow") : atom(true);
  let below, above, primes = "", { limits } = base;
  for (let token; (token = peek());) {
    if (token === "^" ? above : token === "_" ? below : !/^('|\\(no)?limits)$/.test(token)) break;
    ++at;
    if (token === "^") above = atom();
    else if (token === "_") below = atom();
    else if (token === "'") primes += "′";
    else limits = token === "\\limits";
  }
  if (primes) above = make("mrow", [mo(primes), above ?? ""]);
  const tags = limits ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
  return below || above ? make(tags[below && above ? 2 : above ? 1 : 0], [base, below, above].filter(Boolean)) : base;
}

/** A group, a command with its arguments, or a character; `whole`: of a number all digits. */
function atom(whole) {
  let token = take(), node;
  if (++depth > DEEPEST || ends(token)) throw SyntaxError();
  if (!whole && /^\d./.test(token)) {
    tokens[--at] = token.slice(1);
    token = token[0];
  }
  if (token === "{") {
    node = row();
    take("}");
  } else if (token[1] && token[0] === "\\") node = command(token.slice(1));
  else if (token === "~") node = space(SPACES[" "]);
  else {
    const text = token.replace(/[A-Z0-9]/gi, inFont);
    node = /\d/.test(token) ? make("mn", [text])
      : text !== token || (font === "rm" && /[a-z]/i.test(token)) ? make("mi", [text], { mathvariant: "normal" })
        : symbol({ "-": "−", "*": "∗" }[text] ?? text);
  }
  --depth;
  return node;
}

function inFont(c) {
  const [A, zero, elsewhere] = FONTS[font] ?? [], first = c < "A" ? zero && zero - 48 : A - (c < "a" ? 65 : 71);
  return elsewhere?.split(c)[1]?.[0] ?? (first ? String.fromCodePoint(first + c.charCodeAt(0)) : c);
}

/** The characters of a group as they stand. */
function raw(open = "{", close = "}") {
  take(open);
  const from = at;
  for (let level = 1; level; ++at) {
    if (at >= tokens.length) throw SyntaxError();
    level += tokens[at] === open ? 1 : tokens[at] === close ? -1 : 0;
  }
  return tokens.slice(from, at - 1).join("");
}

function named(name, limits) {
  const node = mo(name, { lspace: ".17em", rspace: /^[([]/.test(peek()) ? 0 : ".17em", movablelimits: true });
  return limits ? loud(node) : node;
}

function delimiter() {
  const token = take();
  return token === "\\|" ? "‖" : SYMBOLS.get(token.slice(1)) ?? token.at(-1);
}

const fraction = (style) => () => make("mstyle", [make("mfrac", [atom(), atom()])], style);
const swapped = (tag) => (first = atom()) => make(tag, [atom(), first]);
const text = () => make("mtext", [raw().replace(/\s+/g, "\u00a0")]);
const COMMANDS = {
  frac: fraction(), dfrac: fraction({ displaystyle: true }), tfrac: fraction({ displaystyle: false }),
  binom: () => fenced("(", make("mfrac", [atom(), atom()], { linethickness: 0 }), ")"),
  sqrt: () => {
    if (peek() !== "[") return make("msqrt", [atom()]);
    ++at;
    const index = row("]");
    take("]");
    return make("mroot", [atom(), index]);
  },
  left: () => {
    const open = delimiter(), inside = row();
    take("\\right");
    return fenced(open, inside, delimiter());
  },
  middle: () => fence(delimiter()),
  begin: () => {
    const name = raw().replace("*", ""), columns = name === "array" ? raw().replace(/[^lcr]/g, "") : "";
    const node = grid(rows("\\end"), /align|split|eqn/.test(name) ? "align" : name, columns);
    raw();
    const [open, close] = FENCES[name.replace(/(?<=.)matrix/, "")] ?? "";
    return open ? fenced(open, node, close) : node;
  },
  tag: () => make("mtext", [`\u2003(${raw()})`]),
  operatorname: () => (peek() === "*" ? named(raw(tokens[++at]), true) : named(raw())),
  overset: swapped("mover"), underset: swapped("munder"),
  xrightarrow: () => make("mover", [mo("→", { stretchy: true }), atom()]),
  pmod: () => make("mrow", [space("1em"), symbol("("), named("mod"), atom(), symbol(")")]),
  bmod: () => named("mod"),
  boxed: () => make("mrow", [atom()], { class: "boxed" }),
  text, textrm: text, textit: text, mbox: text,
};

function command(name) {
  const own = (table) => Object.hasOwn(table, name), size = SIZES.indexOf(name.replace(/[lrm]$/, ""));
  if (own(COMMANDS)) return COMMANDS[name]();
  if (own(SPACES)) return space(SPACES[name]);
  if (/^[^a-z]/i.test(name)) return symbol(name === "|" ? "‖" : name);
  if (SYMBOLS.has(name)) return symbol(SYMBOLS.get(name));
  const greek = GREEK.indexOf(name.toLowerCase());
  if (greek >= 0) return symbol(String.fromCharCode(greek + (/^[A-Z]/.test(name) ? 913 : 945)));
  if (LIMITED.includes(name)) return named(name.replace(/^(lim|arg)(?=.)/, "$1 "), true);
  if (FUNCTIONS.includes(name)) return named(name);
  if (/^(\w+style|nonumber|notag|hline)$/.test(name)) return make("mrow");
  if (ACCENTS.has(name)) {
    const mark = mo(ACCENTS.get(name), { stretchy: /^(over|under|wide)/.test(name) });
    return loud(make(name[0] === "u" ? "munder" : "mover", [atom(), mark], { accent: true }));
  }
  if (size >= 0) return fence(delimiter(), { minsize: `${1.2 + 0.6 * size}em`, maxsize: `${1.2 + 0.6 * size}em` });
  const [, style] = /^(?:math|text|bold)(bb|cal|scr|frak|bf|sf|tt|rm|it|symbol)$/.exec(name) ?? [];
  if (!style) return make("mtext", [`\\${name}`]);
  const before = font;
  font = { scr: "cal", symbol: "bf", sf: "rm", tt: "rm" }[style] ?? style;
  const node = atom(true);
  font = before;
  return node;
}
