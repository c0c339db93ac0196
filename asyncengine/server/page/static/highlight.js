// Colours for code: one tokenizer, and a table of languages.

const LONGEST = 40_000;  // characters; longer code stays plain
const KINDS = ["comment", "name", "string", "keyword", "number", ""];

const BOTH = /"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?/, LINES = /"(?:[^"\\]|\\[^])*"?|'(?:[^'\\]|\\[^])*'?/;
const HASH = /(?<!\S)#.*/, NONE = /(?!)/, BLOCK = /\/\*[^]*?(?:\*\/|$(?![^]))/;  // to the end of all, where m has $ for that of lines
const either = (...forms) => new RegExp(forms.map((form) => form.source).join("|"));
/** Of each: its names, its comments, names and strings, and its keywords or what looks like them. */
const LANGUAGES = [
  ["python py python3", HASH, /@[\w.]+/, /[rbfu]{0,2}(?:"""[^]*?(?:"""|$(?![^]))|'''[^]*?(?:'''|$(?![^]))|"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?)/,
    "and as assert async await break class continue def del elif else except finally for from global if import in is lambda " +
    "not or pass raise return try while with yield None True False self"],
  ["javascript js jsx typescript ts tsx json c h cpp c++ cuda cu csharp cs java kotlin go golang rust rs swift",
    either(/\/\/.*/, BLOCK), /(?<!\\)"(?:[^"\\\n]|\\.)*"(?=\s*:)|[@#]\w+|\w+!(?=[([{])|__\w+__/,
    /"(?:[^"\\\n]|\\.)*"?|(?<!\\)'(?:[^'\\\n]|\\.)*'(?!\w)|`(?:[^`\\]|\\[^])*`?/,  // Rust's 'a is no string
    "if else for while do break continue return switch case default const static struct enum import true false try catch throw " +
    "class public private protected new this int float double char bool boolean void long short unsigned interface let var " +
    "function async await export from of in typeof instanceof delete yield finally extends super null undefined type auto " +
    "extern typedef sizeof union inline template typename namespace using virtual constexpr nullptr fn mut pub use mod impl " +
    "trait match loop as where move self Self unsafe func package map chan go defer range select nil string error final " +
    "abstract implements throws val"],
  ["bash sh shell zsh console", HASH, /\$(?:\w+|\{[^}\n]*\}?)/, LINES,
    "if then elif else fi for in do done while case esac function return exit local export echo cd set source sudo"],
  ["sql", either(/--.*/, BLOCK), NONE, LINES,
    "select from where and or not in is null as join left right inner outer on group by order having limit insert into values " +
    "update set delete create table index drop alter primary key references distinct union all case when then else end between like with asc desc"],
  ["html xml svg", /<!--[^]*?(?:-->|$(?![^]))/, /(?<![\w:-])[\w:-]+(?==["'])/, /(?<==)(?:"[^"]*"?|'[^']*'?)/, /<\/?[\w:-]+|\/?>/],
  ["css scss", BLOCK, /(?<![\w-])[\w-]+(?=:\s)|#[\w-]+/, BOTH, /@[\w-]+/],
  ["yaml yml toml ini", HASH, /(?<![\w./-])[\w./-]+(?=:\s| *=)|^\[.*/, BOTH, "true false null"],
  ["diff patch", /^(?:diff|index|---|\+\+\+).*/, /^@@.*/, /^\+.*/, /^-.*/],
];

/** The parts of some code, in order, [class, text] each. The class of plain text is "". */
export function highlight(code, language) {
  const parts = [], found = code.length <= LONGEST && LANGUAGES.find(([names]) => names.split(" ").includes(language.toLowerCase()));
  const [, comment, name, string, words] = found || [], keywords = words?.split?.(" ") ?? [];
  const forms = found ? [comment, name, string, words.source ? words : NONE, /\d[\w.]*/, /[a-z_$][\w$]*/] : [NONE];
  const find = new RegExp(forms.map((form) => `(${form.source})`).join("|"), "gim");
  let from = 0;
  const add = (kind, text) => {
    from += text.length;
    if (!kind && parts.at(-1)?.[0] === "") parts.at(-1)[1] += text;
    else if (text) parts.push([kind, text]);
  };
  for (const { 0: text, index, ...groups } of code.matchAll(find)) {
    add("", code.slice(from, index));
    const word = groups[6] && (language === "sql" ? text.toLowerCase() : text);
    add(keywords.includes(word) ? "keyword" : word && code[index + text.length] === "(" ? "name"
      : KINDS[[1, 2, 3, 4, 5, 6].find((i) => groups[i] !== undefined) - 1], text);
  }
  add("", code.slice(from));
  return parts;
}
