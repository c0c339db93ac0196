"""Results of structured output for the cases of the JSON Schema Test Suite, keyword by keyword.

    python bench/json_schema_suite.py TESTS [--draft draft2020-12 --draft draft7] [--json FILE]

TESTS is the suite's folder of tests (json-schema-org/JSON-Schema-Test-Suite on GitHub), or the folder json/tests of the
source distribution of the package jsonschema. Each instance is written as models write JSON, and given to the grammar
of its schema. A schema is refused, or its instances are decided: right is to take what is valid and nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

from asyncengine import InvalidRequestError, bundled_model
from asyncengine.api.structured_outputs import StructuredOutputs
from asyncengine.cli.benchmarks import report
from asyncengine.cli.benchmarks.report import Figure
from asyncengine.engine.constraints.grammars import Grammars
from asyncengine.text.tokenizer import Tokenizer

COLUMNS = ("schemas", "refused", "right", "valid refused", "invalid taken")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tests", type=Path, help="the suite's folder of tests")
    parser.add_argument("--draft", action="append", help="(default: draft2020-12)")
    parser.add_argument("--json", type=Path, help="also write the table here")
    args = parser.parse_args()
    tables = {}
    for draft in args.draft or ["draft2020-12"]:
        cases = {path.stem: json.loads(path.read_text()) for path in sorted((args.tests / draft).glob("*.json"))}
        tables[draft] = asyncio.run(decide_all(cases))
        print(f"\n{draft:<32}" + "".join(f"{name:>15}" for name in COLUMNS))
        for keyword, counts in [*tables[draft].items(), ("all", sum(tables[draft].values(), Counter()))]:
            print(f"{keyword:<32}" + "".join(f"{counts[name]:>15}" for name in COLUMNS))
    if args.json is not None:
        figures = [
            Figure(f"{draft}: {name}", sum(counts[name] for counts in table.values()), "cases")
            for draft, table in tables.items()
            for name in ("right", "valid refused", "invalid taken")
        ]
        settings = {"drafts": list(tables)}
        report.write(
            args.json, report.record("json_schema_suite", figures, repeats=1, settings=settings, results=tables)
        )


async def decide_all(cases: dict[str, list[dict[str, Any]]]) -> dict[str, Counter[str]]:
    tokenizer = Tokenizer.from_pretrained(str(bundled_model()))
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id or 0])
    table = {}
    for keyword, schemas in cases.items():
        counts: Counter[str] = Counter(schemas=len(schemas))
        for case in schemas:
            counts += await decide(grammars, tokenizer, case)
        table[keyword] = counts
    grammars.close()
    return table


async def decide(grammars: Grammars, tokenizer: Tokenizer, case: dict[str, Any]) -> Counter[str]:
    schema = case["schema"]
    if isinstance(schema, bool):
        return Counter(refused=1)  # a request's schema is an object
    try:
        matcher = await grammars.compile(StructuredOutputs(json=schema))
    except InvalidRequestError:
        return Counter(refused=1)
    counts: Counter[str] = Counter()
    for test in case["tests"]:
        text = json.dumps(test["data"], separators=(",", ":"), ensure_ascii=False)
        one = matcher.deep_copy()
        tokens = tokenizer.encode(text, add_special_tokens=False)
        taken = one.try_consume_tokens(tokens) == len(tokens) and one.is_accepting()
        if taken == test["valid"]:
            counts["right"] += 1
        else:
            counts["valid refused" if test["valid"] else "invalid taken"] += 1
    return counts


if __name__ == "__main__":
    main()
