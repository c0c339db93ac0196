"""``python -m asyncengine.examples`` lists the examples."""

import ast
from pathlib import Path

for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
    first_line = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]
    print(f"python -m asyncengine.examples.{path.stem:<17} {first_line}")
