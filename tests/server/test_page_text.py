"""The page's rendering of a text: Markdown, formulas and colours of code, run by Node without a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from asyncengine.server.page import routes

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="no Node on this machine")
FOLDER = Path(routes.__file__).with_name("static")
STEPS_A_CHARACTER = 12
"""The most nodes that a text may cost for each of its characters."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts, with a file that tells Node that they are modules."""
    copy = tmp_path_factory.mktemp("page")
    for path in FOLDER.glob("*.js"):
        shutil.copy(path, copy)
    (copy / "package.json").write_text('{"type": "module"}')
    return copy


def run(folder: Path, cases: list[dict[str, Any]]) -> list[Any]:
    command = [str(NODE), str(Path(__file__).with_name("page_text.mjs"))]
    asked = json.dumps({"folder": str(folder), "cases": cases})
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    results: list[Any] = json.loads(done.stdout)
    return results


ALIGNED = """| a | b | c | `x|y` |
|:--|:-:|--:|---|
| 1 | \\| | `p|q` |
| 2 | **b** | $x$ | 4 | 5 |"""
LINK = 'rel="noopener noreferrer nofollow" target="_blank"'
MARKDOWN = {
    ALIGNED: '<div class="wide" tabindex="0"><table><thead><tr><th>a</th><th class="center">b</th>'
    '<th class="right">c</th><th><code>x|y</code></th></tr></thead><tbody><tr><td>1</td>'
    '<td class="center">|</td><td class="right"><code>p|q</code></td><td></td></tr><tr><td>2</td>'
    '<td class="center"><strong>b</strong></td><td class="right"><math><mi>x</mi></math></td><td>4</td></tr></tbody>'
    "</table></div>",
    "See:\n| a |\n|-|": '<p>See:</p><div class="wide" tabindex="0"><table><thead><tr><th>a</th></tr></thead>'
    "<tbody></tbody></table></div>",
    "a | b\n---": "<p>a | b</p><hr>",
    "- [ ] a\n- [x] *b*\n  - c": '<ul><li><label class="task"><input type="checkbox" disabled="">a</label></li>'
    '<li><label class="task"><input type="checkbox" disabled="" checked=""><em>b</em></label>'
    "<ul><li>c</li></ul></li></ul>",
    "1. a\n   - b\n     - c\n2. d": "<ol><li>a<ul><li>b<ul><li>c</li></ul></li></ul></li><li>d</li></ol>",
    "3. a\n4. b\n\n   c": '<ol start="3"><li>a</li><li><p>b</p><p>c</p></li></ol>',
    "> a\n> - b\n>   > c": "<blockquote><p>a</p><ul><li>b<blockquote><p>c</p></blockquote></li></ul></blockquote>",
    "***a*** **b *c* d** *e **f***": "<p><em><strong>a</strong></em> <strong>b <em>c</em> d</strong> "
    "<em>e <strong>f</strong></em></p>",
    "_a_b_ __c__ a__b__ 2 * 3 * 4 ~5 ~~6~~": "<p><em>a_b</em> <strong>c</strong> a__b__ 2 * 3 * 4 ~5 <del>6</del></p>",
    "**「文」**字": "<p><strong>「文」</strong>字</p>",
    "# a #\n## *b*\nc\\\nd  \ne": "<h1>a</h1><h2><em>b</em></h2><p>c<br>d<br>e</p>",
    "\\*a\\* \\` \\$5": "<p>*a* ` $5</p>",
    '[a [b] *c*](https://x.org/(y) "title")': f'<p><a href="https://x.org/(y)" {LINK}>a [b] <em>c</em></a></p>',
    "<https://x.org/a> (https://x.org/b_(c)).": f'<p><a href="https://x.org/a" {LINK}>https://x.org/a</a> '
    f'(<a href="https://x.org/b_(c)" {LINK}>https://x.org/b_(c)</a>).</p>',
    "[m](mailto:a@b.c) ![an *image*](https://x.org/i.png)": f'<p><a href="mailto:a@b.c" {LINK}>m</a> '
    f'<a href="https://x.org/i.png" {LINK}>an <em>image</em></a></p>',
    "[a](javascript:x) [b](ftp://x) [c](/d) ![e](data:f)": "<p>[a](javascript:x) [b](ftp://x) [c](/d) ![e](data:f)</p>",
    "<b>a</b> <script> a<br>b": "<p>&lt;b>a&lt;/b> &lt;script> a<br>b</p>",
    "``a`b`` `c\nd` `e": "<p><code>a`b</code> <code>c d</code> `e</p>",
    "It costs $5 and $10, or US$6.": "<p>It costs $5 and $10, or US$6.</p>",
    "$a$ \\(b\\), $c $ d$": "<p><math><mi>a</mi></math> <math><mi>b</mi></math>, $c $ d$</p>",
    "$$\nx\n$$.": '<div class="wide" tabindex="0"><math display="block"><mrow><mi>x</mi><mo>.</mo></mrow></math></div>',
    "\\[ y": '<div class="wide" tabindex="0"><code> y</code></div>',
    "$\\frac{a$": "<p><code>\\frac{a</code></p>",
    "$$ is money\n\nb": "<p>$$ is money</p><p>b</p>",
}


def test_markdown(folder: Path) -> None:
    whole = run(folder, [{"kind": "text", "text": text} for text in MARKDOWN])
    assert dict(zip(MARKDOWN, whole, strict=True)) == MARKDOWN
    streamed = run(folder, [{"kind": "text", "text": text, "pieces": True} for text in MARKDOWN])
    assert streamed == whole


def test_code_in_lists_keeps_its_lines(folder: Path) -> None:
    text = "- a\n\n  ```py\n  if x:\n\n\n      y\n  ```\n\n- b"
    (html,) = run(folder, [{"kind": "text", "text": text}])
    assert html.count("<ul>") == 1
    assert '<pre tabindex="0"><code><span class="keyword">if</span> x:\n\n\n    y</code></pre>' in html


HOSTILE = [
    "*a ", "a* ", "**", "_a_", "*a_ ", "~~x", "[", "](", "[a](", "![", "[a](b (", "`", "`` ` ", "``` ", "> ", "- ",
    "1. ", "  - a\n", "|\n-|\n", "|a|b|\n|-|-|\n", "|`", "\\(", "\\[\n", "$a ", "$", "$$", "$$\n", "$$a\n\n", "<",
    "<https://", "# ", "\n\n", " ", "\t", "https://", "(https://a", "((", "\\",
]  # fmt: skip


def test_hostile_text_costs_as_much_as_it_is_long(folder: Path) -> None:
    size = 20_000
    texts = [each * (size // len(each)) for each in HOSTILE]
    texts.append("|a" * 3000 + "\n" + "|-" * 3000 + "\n" + "|\n" * 3000)
    for each, (made, _) in zip(
        [*HOSTILE, "wide"], run(folder, [{"kind": "size", "text": text} for text in texts]), strict=True
    ):
        assert made < STEPS_A_CHARACTER * size, each


MATH = {
    "x_i^2": "<msubsup><mi>x</mi><mi>i</mi><mn>2</mn></msubsup>",
    "x^12": "<mrow><msup><mi>x</mi><mn>1</mn></msup><mn>2</mn></mrow>",
    "\\frac12": "<mstyle><mfrac><mn>1</mn><mn>2</mn></mfrac></mstyle>",
    "\\sqrt[3]{3.14}": "<mroot><mn>3.14</mn><mn>3</mn></mroot>",
    "f''": "<msup><mi>f</mi><mrow><mo>′′</mo></mrow></msup>",
    "\\alpha\\le\\Omega": '<mrow><mi>α</mi><mo>≤</mo><mi mathvariant="normal">Ω</mi></mrow>',
    "\\sum_{i}^n": "<munderover><mo>∑</mo><mi>i</mi><mi>n</mi></munderover>",
    "\\int\\limits_0": "<munder><mo>∫</mo><mn>0</mn></munder>",
    "\\mathbb{R}\\mathcal{L}\\mathbf{1}": '<mrow><mi mathvariant="normal">ℝ</mi><mi mathvariant="normal">ℒ</mi>'
    "<mn>𝟏</mn></mrow>",
    "\\left(x\\right.": '<mrow><mo stretchy="true">(</mo><mi>x</mi><mo stretchy="true"></mo></mrow>',
    "\\hat{x}": '<mover accent="true"><mi>x</mi><mo stretchy="false">^</mo></mover>',
    "\\text{if }x": "<mrow><mtext>if&nbsp;</mtext><mi>x</mi></mrow>",
    "\\begin{cases}a&b\\\\c\\end{cases}": '<mrow><mo stretchy="true">{</mo><mtable class="cases"><mtr><mtd class="">'
    '<mi>a</mi></mtd><mtd class=""><mi>b</mi></mtd></mtr><mtr><mtd class=""><mi>c</mi></mtd></mtr></mtable>'
    '<mo stretchy="true"></mo></mrow>',
    "\\foo x": "<mrow><mtext>\\foo</mtext><mi>x</mi></mrow>",
}
UNREADABLE = [
    "{",
    "}",
    "x^",
    "\\frac{a}",
    "\\left(",
    "\\begin{matrix}a",
    "\\end{x}",
    "\\text{a",
    "\\sqrt[",
    "_",
    "a" * 4001,
]


def test_formulas(folder: Path) -> None:
    shown = run(folder, [{"kind": "math", "text": text} for text in MATH])
    assert dict(zip(MATH, shown, strict=True)) == MATH


def test_what_is_no_formula_is_none(folder: Path) -> None:
    deep = [each * 1000 for each in ("{", "\\hat", "x^", "\\left(", "\\sqrt[", "{x")] + ["{" * 50 + "x" + "}" * 50]
    assert set(run(folder, [{"kind": "math", "text": text} for text in UNREADABLE + deep])) == {None}


def colours(parts: list[list[str]], kind: str) -> list[str]:
    return [text for name, text in parts if name == kind]


def test_colours_of_code(folder: Path) -> None:
    sources = {
        "py": '@d\ndef f(x):\n    """a"b"""\n    return f"{x}" + 0x1F  # c\ny = "half\nz = 1',
        "js": "const a = `x\n${b}`; f('c', 1.5); /* d",
        "cpp": "#include <a>\n__global__ void k(char c = '\\n') { g(\"s\"); } // e",
        "rs": "fn f<'a>(x: &'a str) -> char { 'x' }",
        "json": '{"a": "b", "c": [true, 1]}',
        "sh": 'for f in "$g"; do echo $h # i\ndone; a#b',
        "sql": "SELECT a FROM b WHERE c = 'd' -- e",
        "html": '<!-- a --><b c="d">don\'t</b>',
        "css": "@media x { a { color: #fff } }",
        "toml": '[a]\nb = "c" # d',
        "yaml": "- a: true\n  b: 'c'",
        "diff": "--- a\n+++ b\n@@ 1\n-c\n+d",
        "nothing": "def f",
    }
    results = run(folder, [{"kind": "code", "language": name, "text": text} for name, text in sources.items()])
    found = dict(zip(sources, results, strict=True))
    for name, source in sources.items():
        assert "".join(text for _, text in found[name]) == source
    assert found["nothing"] == [["", "def f"]]
    expected = {
        ("py", "keyword"): ["def", "return"],
        ("py", "string"): ['"""a"b"""', 'f"{x}"', '"half'],  # one that has no end ends with its line
        ("py", "number"): ["0x1F", "1"],
        ("py", "comment"): ["# c"],
        ("py", "name"): ["@d", "f"],
        ("js", "string"): ["`x\n${b}`", "'c'"],
        ("js", "comment"): ["/* d"],
        ("js", "name"): ["f"],
        ("cpp", "name"): ["#include", "__global__", "k", "g"],
        ("cpp", "string"): ["'\\n'", '"s"'],
        ("rs", "string"): ["'x'"],
        ("json", "name"): ['"a"', '"c"'],
        ("json", "string"): ['"b"'],
        ("sh", "keyword"): ["for", "in", "do", "echo", "done"],
        ("sh", "comment"): ["# i"],
        ("sql", "keyword"): ["SELECT", "FROM", "WHERE"],
        ("html", "string"): ['"d"'],
        ("html", "name"): ["c"],
        ("css", "name"): ["color", "#fff"],
        ("toml", "name"): ["[a]", "b"],
        ("yaml", "name"): ["a", "b"],
        ("diff", "string"): ["+d"],
        ("diff", "keyword"): ["-c"],
    }
    assert {key: colours(found[key[0]], key[1]) for key in expected} == expected


def test_long_code_stays_plain(folder: Path) -> None:
    text = "def f\n" * 10_000
    assert run(folder, [{"kind": "code", "language": "py", "text": text}]) == [[["", text]]]
