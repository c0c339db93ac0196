// TeX formulas as MathML, which browsers draw. An unknown command shows as it was written.

const LONGEST = 4000, DEEPEST = 40;  // characters; groups and commands within each other

const words = (text) => text.split(" ");
const GREEK = words("alpha beta gamma delta varepsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho varsigma " +
  "sigma tau upsilon varphi chi psi omega");
const pairs = (text) => new Map(Array.from(text.matchAll(/([a-z]+)(.)/giu), ([, name, value]) => [name, value]));
const SYMBOLS = pairs(`epsilonϵphiϕvarthetaϑinfty∞partial∂nabla∇emptyset∅varnothing∅hbarℏellℓReℜImℑforall∀exists∃neg¬lnot¬
angle∠degree°dagger†prime′pm±mp∓times×div÷cdot⋅ast∗star⋆circ∘bullet∙oplus⊕otimes⊗odot⊙cap∩cup∪setminus∖wedge∧land∧vee∨lor∨
le≤leq≤ge≥geq≥ne≠neq≠ll≪gg≫approx≈equiv≡sim∼simeq≃cong≅propto∝in∈notin∉ni∋subset⊂supset⊃subseteq⊆supseteq⊇mid∣parallel∥
perp⟂models⊨vdash⊢bot⊥top⊤to→rightarrow→leftarrow←gets←leftrightarrow↔Rightarrow⇒Leftarrow⇐Leftrightarrow⇔implies⟹iff⟺
mapsto↦longrightarrow⟶uparrow↑downarrow↓rightleftharpoons⇌ldots…dots…cdots⋯vdots⋮ddots⋱sum∑prod∏int∫iint∬iiint∭oint∮
bigcup⋃bigcap⋂bigoplus⨁langle⟨rangle⟩lfloor⌊rfloor⌋lceil⌈rceil⌉vert|lvert|rvert|Vert‖lVert‖rVert‖backslash\\colon:therefore∴`);
const ACCENTS = pairs("hat^widehat^bar¯overline‾vec→overrightarrow→dot˙ddot¨tilde~widetilde~check?overbrace⏞underbrace⏟underline_");
const SPACES = { ",": ".17em", ":": ".22em", ";": ".28em", "!": "-.17em", " ": ".25em", quad: "1em", qquad: "2em" };
const FENCES = { p: "()", b: "[]", B: "{}", v: "||", V: "‖‖", cases: "{." };
const LIMITED = words("lim max min sup inf limsup liminf argmax argmin det gcd Pr");
const FUNCTIONS = words("arccos arcsin arctan arg cos cosh cot csc deg dim exp ker lg ln log sec sin sinh tan tanh");
const IGNORED = words("displaystyle textstyle nonumber notag hline");
const SIZES = { big: "1.2em", Big: "1.8em", bigg: "2.4em", Bigg: "3em" };
/** Of a font: the code point of its A, of its 0, and the letters that Unicode has elsewhere. */
const FONTS = {
  bb: [0x1d538, 0x1d7d8, "CℂHℍNℕPℙQℚRℝZℤ"], cal: [0x1d49c, 0, "BℬEℰFℱHℋIℐLℒMℳRℛeℯgℊoℴ"],
  frak: [0x1d504, 0, "CℭHℌIℑRℜZℨ"], bf: [0x1d400, 0x1d7ce, ""],
};

function make(tag, children, attributes = {}) {
  const node = document.createElementNS("http://www.w3.org/1998/Math/MathML", tag);
  node.append(...children);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

const operator = (text, attributes) => make("mo", [text], attributes);
const space = (width) => make("mspace", [], { width });
const loud = (node) => Object.assign(node, { limits: true });  // scripts stand above and below it
const fence = (text, size) =>
  operator(text === "." ? "" : text, { stretchy: "true", ...(size && { minsize: size, maxsize: size }) });
const fenced = (open, inside, close) => make("mrow", [fence(open), inside, fence(close)]);

function symbol(c) {
  if (/[\p{L}∞∂∇∅]/u.test(c)) return make("mi", [c], /[Α-Ω∞∂∇∅]/.test(c) ? { mathvariant: "normal" } : {});
  if (/[()[\]{}|‖/⟨⟩⌊⌋⌈⌉]/.test(c)) return operator(c, { stretchy: "false", lspace: "0", rspace: "0" });
  return /[∑∏⋃⋂⨁]/.test(c) ? loud(operator(c)) : operator(c);
}

const grid = (rows, name, columns = "") => make("mtable", rows.map((row) => make("mtr",
  row.map((cell, i) => make("mtd", [cell], /[lr]/.test(columns[i]) ? { class: columns[i] } : {})))), { class: name });

let tokens, at, depth, font;

/** The element for a formula; null where the TeX cannot be read, or is too long or too deep. */
export function math(tex, display) {
  if (tex.length > LONGEST) return null;
  tokens = tex.match(/\\[a-z]+|\\?[^]/giu) ?? [];
  at = depth = 0;
  font = "";
  try {
    const all = rows();
    return make("math", [all[0][1] || all[1] ? grid(all, "align") : all[0][0]], display ? { display: "block" } : {});
  } catch (error) {
    if (error instanceof SyntaxError) return null;
    throw error;
  }
}

function peek() {
  while (/^\s/.test(tokens[at])) ++at;
  return tokens[at];
}

function take(...allowed) {
  const token = peek();
  if (token === undefined || (allowed[0] && !allowed.includes(token))) throw new SyntaxError(`not here: ${token}`);
  ++at;
  return token;
}

/** Rows of cells, up to `end`, which is taken. */
function rows(end) {
  const all = [[]];
  for (;;) {
    all.at(-1).push(row());
    if (peek() !== end && take("&", "\\\\") === "&") continue;
    if (tokens[at] === "[") raw("]");
    if (peek() === end) break;
    all.push([]);
  }
  ++at;
  return all;
}

function row(end) {
  const parts = [];
  while (![undefined, "}", "&", "\\\\", "\\right", "\\end", end].includes(peek())) parts.push(scripted());
  return parts.length === 1 ? parts[0] : make("mrow", parts);
}

function scripted() {
  const base = /^[\^_']$/.test(peek()) ? make("mrow", []) : atom(true);
  let below, above, primes = "", { limits } = base;
  for (let token; (token = peek());) {
    if (token === "^" ? above : token === "_" ? below : !/^('|\\(no)?limits)$/.test(token)) break;
    ++at;
    if (token === "^") above = atom();
    else if (token === "_") below = atom();
    else if (token === "'") primes += "′";
    else limits = token === "\\limits";
  }
  if (primes) above = make("mrow", [operator(primes), ...(above ? [above] : [])]);
  const [under, over, both] = limits ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
  if (below) return above ? make(both, [base, below, above]) : make(under, [base, below]);
  return above ? make(over, [base, above]) : base;
}

/** A group, a command with its arguments, or a character; `wide`: a whole number, an upright word. */
function atom(wide) {
  if (++depth > DEEPEST) throw new SyntaxError("too deep");
  let token = take(), node;
  if (["}", "&", "\\\\", "\\right", "\\end"].includes(token)) throw new SyntaxError(`not here: ${token}`);
  if (token === "{") {
    node = row();
    take("}");
  } else if (token[1] && token[0] === "\\") node = command(token.slice(1));
  else if (token === "~") node = space(SPACES[" "]);
  else {
    const digit = /\d/.test(token), run = digit ? /\d/ : font === "rm" ? /[a-z]/i : /^$/;
    while (wide && (run.test(tokens[at]) && tokens[at][1] === undefined || digit && tokens[at] === "." && run.test(tokens[at + 1]))) token += tokens[at++];
    const text = token.replace(/[A-Za-z0-9]/g, inFont);
    if (digit) node = make("mn", [text]);
    else if (text !== token || (font && run.test(token))) node = make("mi", [text], { mathvariant: "normal" });
    else node = symbol({ "-": "−", "*": "∗" }[text] ?? text);
  }
  --depth;
  return node;
}

function inFont(c) {
  const [A, zero, elsewhere] = FONTS[font] ?? [];
  const first = c < "A" ? zero && zero - 48 : A && A - (c < "a" ? 65 : 71);
  return elsewhere?.split(c)[1]?.[0] ?? (first ? String.fromCodePoint(first + c.charCodeAt(0)) : c);
}

/** The characters of a group as they stand. */
function raw(end = "}") {
  take(end === "}" ? "{" : "[");
  const from = at;
  for (let open = 1; open; ++at) {
    if (at >= tokens.length) throw new SyntaxError("a group has no end");
    open += tokens[at] === "{" ? 1 : tokens[at] === end ? -1 : 0;
  }
  return tokens.slice(from, at - 1).join("");
}

function named(name, limits) {
  const node = operator(name, { lspace: ".17em", rspace: /^[([]/.test(peek()) ? "0" : ".17em", movablelimits: "true" });
  return limits ? loud(node) : node;
}

function delimiter() {
  const token = take();
  return token === "\\|" ? "‖" : SYMBOLS.get(token.slice(1)) ?? token.at(-1);
}

const swapped = (tag) => (first = atom()) => make(tag, [atom(), first]);
const COMMANDS = {
  binom: () => fenced("(", make("mfrac", [atom(), atom()], { linethickness: "0" }), ")"),
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
    const fences = FENCES[name.replace(/(?<=.)matrix/, "")];
    return fences ? fenced(fences[0], node, fences[1]) : node;
  },
  tag: () => make("mtext", [`\u2003(${raw()})`]),
  operatorname: () => named(raw(peek() === "*" ? ++at && "}" : "}")),
  overset: swapped("mover"), underset: swapped("munder"),
  xrightarrow: () => make("mover", [operator("→", { stretchy: "true" }), atom()]),
  pmod: () => make("mrow", [space("1em"), symbol("("), named("mod"), atom(), symbol(")")]),
  bmod: () => named("mod"),
  boxed: () => make("mrow", [atom()], { class: "boxed" }),
};

function command(name) {
  const own = (table) => Object.hasOwn(table, name) && table[name];
  if (own(COMMANDS)) return COMMANDS[name]();
  if (own(SPACES)) return space(SPACES[name]);
  if (/^[^a-z]/i.test(name)) return symbol(name === "|" ? "‖" : name);
  if (SYMBOLS.has(name)) return symbol(SYMBOLS.get(name));
  const greek = GREEK.indexOf(name.toLowerCase());
  if (greek >= 0) return symbol(String.fromCharCode(greek + (/^[A-Z]/.test(name) ? 913 : 945)));
  if (LIMITED.includes(name)) return named(name.replace(/^(lim|arg)(?=.)/, "$1 "), true);
  if (FUNCTIONS.includes(name)) return named(name);
  if (IGNORED.includes(name)) return make("mrow", []);
  if (ACCENTS.has(name)) {
    const stretchy = String(/^(over|under|wide)/.test(name)), mark = operator(ACCENTS.get(name), { stretchy });
    return loud(make(name.startsWith("under") ? "munder" : "mover", [atom(), mark], { accent: "true" }));
  }
  if (/^[dtc]?frac$/.test(name)) {
    const node = make("mfrac", [atom(), atom()]);
    return name === "frac" ? node : make("mstyle", [node], { displaystyle: String(name !== "tfrac") });
  }
  if (/^(text(rm|it)?|mbox)$/.test(name)) return make("mtext", [raw().replace(/\s+/g, "\u00a0")]);
  const size = SIZES[name.replace(/[lrm]$/, "")];
  if (size) return fence(delimiter(), size);
  const [, style] = /^(?:math|text|bold)(bb|cal|scr|frak|bf|sf|tt|rm|it|symbol)$/.exec(name) ?? [];
  if (!style) return make("mtext", [`\\${name}`]);
  const before = font;
  font = { scr: "cal", symbol: "bf", sf: "rm", tt: "rm", it: "" }[style] ?? style;
  const node = atom(true);
  font = before;
  return node;
}
