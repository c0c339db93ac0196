// Colours for code: one tokenizer, and a table of the comments, names, strings and keywords of each language.

const LONGEST = 40_000;  // characters; longer code stays plain

const HASH = "(?<!\\S)#.*", BLOCK = "\\/\\*[^]*?(?:\\*\\/|$(?![^]))", SLASHES = `\\/\\/.*|${BLOCK}`;
const quoted = (mark, inside = ".") => `${mark}(?:[^${mark}\\\\${inside === "." ? "\\n" : ""}]|\\\\${inside})*${mark}?`;
const triple = (mark) => `${mark}{3}[^]*?(?:${mark}{3}|$(?![^]))`;
const BOTH = `${quoted('"')}|${quoted("'")}`, LINES = `${quoted('"', "[^]")}|${quoted("'", "[^]")}`, TICKS = quoted("`", "[^]");
const CURLY = [SLASHES, "[@#]\\w+|\\w+!(?=[([{])|__\\w+__", `${quoted('"')}|'(?:\\\\.[^'\\n]*|[^'\\\\\\n])'|${TICKS}`];
const BASE = "if else for while do break continue return switch case default const static struct enum import true false try catch " +
  "throw class public private new this int float double char bool void interface ";
const LANGUAGES = {
  python: [HASH, "@[\\w.]+", `[rbfu]{0,2}(?:${triple('"')}|${triple("'")}|${BOTH})`, "and as assert async await break class continue " +
    "def del elif else except finally for from global if import in is lambda not or pass raise return try while with yield None " +
    "True False self"],
  javascript: [SLASHES, CURLY[1], `${BOTH}|${TICKS}`, BASE + "let var function async await export from of in typeof instanceof delete " +
    "yield finally extends super null undefined type string number"],
  c: [...CURLY, BASE + "long short unsigned auto extern typedef sizeof union inline template typename namespace using virtual " +
    "constexpr nullptr NULL delete size_t"],
  rust: [...CURLY, BASE + "fn let mut pub use mod impl trait match loop in as where move async await self Self type unsafe"],
  go: [...CURLY, BASE + "func package var type map chan go defer range select nil string error"],
  java: [...CURLY, BASE + "long boolean final abstract extends implements package super null throws protected var finally"],
  bash: [HASH, "\\$(?:\\w+|\\{[^}\\n]*\\}?)", LINES, "if then elif else fi for in do done while case esac function return exit local " +
    "export echo cd set source sudo"],
  sql: [`--.*|${BLOCK}`, "", LINES, "select from where and or not in is null as join left right inner outer on group by order having " +
    "limit insert into values update set delete create table index drop alter primary key references distinct union all case " +
    "when then else end between like with asc desc"],
  html: ["<!--[^]*?(?:-->|$(?![^]))", "(?<![\\w:-])[\\w:-]+(?==[\"'])", `(?<==)(?:${LINES})`, "", "<\\/?[\\w:-]+|\\/?>"],
  css: [BLOCK, "(?<![\\w-])[\\w-]+(?=:\\s)|#[\\w-]+", BOTH, "", "@[\\w-]+"],
  json: [SLASHES, '"(?:[^"\\\\\\n]|\\\\.)*"(?=\\s*:)', quoted('"'), "true false null"],
  yaml: [HASH, "(?<![\\w./-])[\\w./-]+(?=:\\s)", BOTH, "true false null"],
  toml: [HASH, "(?<![\\w.-])[\\w.-]+(?= *=)|^\\[.*", LINES, "true false"],
  diff: ["^(?:diff|index|---|\\+\\+\\+).*", "^@@.*", "^\\+.*", "", "^-.*"],
};
const ALIASES = { py: "python", js: "javascript", ts: "javascript", jsx: "javascript", tsx: "javascript", typescript: "javascript",
  cpp: "c", "c++": "c", cuda: "c", cu: "c", rs: "rust", sh: "bash", shell: "bash", xml: "html", svg: "html", yml: "yaml" };
const KINDS = ["comment", "name", "string", "keyword", "number"];

const made = new Map();

function tokenizer(name) {
  const language = Object.hasOwn(ALIASES, name) ? ALIASES[name] : name;
  if (!Object.hasOwn(LANGUAGES, language)) return null;
  if (!made.has(language)) {
    const [comment, other, string, keywords, sign] = LANGUAGES[language];
    const forms = [comment, other, string, sign, "\\d[\\w.]*", "[a-z_$][\\w$]*"].map((form) => `(${form || "(?!)"})`);
    made.set(language, [new RegExp(forms.join("|"), "gim"), new Set(keywords.split(" "))]);
  }
  return made.get(language);
}

/** The parts of some code, in order, [class, text] each. The class of plain text is "". */
export function highlight(code, language) {
  const parts = [], [find, keywords] = (code.length <= LONGEST && tokenizer(language.toLowerCase())) || [/(?!)/g];
  let from = 0;
  const add = (kind, end) => {
    if (kind === "" && parts.at(-1)?.[0] === "") parts.at(-1)[1] += code.slice(from, end);
    else if (end > from) parts.push([kind, code.slice(from, end)]);
    from = end;
  };
  for (const { 0: text, index, ...groups } of code.matchAll(find)) {
    add("", index);
    const end = index + text.length;
    add(groups[6] === undefined ? KINDS[[1, 2, 3, 4, 5].find((i) => groups[i] !== undefined) - 1]
      : keywords.has(language === "sql" ? text.toLowerCase() : text) ? "keyword" : code[end] === "(" ? "name" : "", end);
  }
  add("", code.length);
  return parts;
}
