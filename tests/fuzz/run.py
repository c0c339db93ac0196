"""Coverage-guided fuzzing: python -m tests.fuzz.run TARGET|all [--seconds N] [--seed S].

Each target runs in a process of its own, from the seeds that the repository keeps and from the inputs that earlier
runs found. Prints executions and coverage of each. Exits with 1 if an exception was not caught, a process died, or one
input took more than 30 seconds; the input and the log stay in build/fuzz/TARGET. Needs atheris (the extra "fuzz").
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "fuzz"
TARGETS = sorted(path.stem for path in (HERE / "targets").glob("*.py") if path.stem != "__init__")


def seeds(target: str) -> Path:
    return HERE / "seeds" / target


def fuzz(target: str, seconds: int, seed: int) -> bool:
    """Fuzz a target. Returns whether no fault was found."""
    work = ROOT / "build" / "fuzz" / target
    corpus = work / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "tests.fuzz.one_target", target, f"-max_total_time={seconds}", f"-seed={seed}",
        "-timeout=30", "-rss_limit_mb=4096", "-max_len=4096", "-print_final_stats=1", f"-artifact_prefix={work}/",
        str(corpus), str(seeds(target)),
    ]  # fmt: skip
    log = work / "log.txt"
    # libFuzzer ends its process without Python's exit handlers, so that what they would remove stays.
    with log.open("w") as out, tempfile.TemporaryDirectory() as scratch:
        environment = os.environ | {"PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": scratch}
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=out, stderr=out, check=False).returncode
    text = log.read_text(errors="replace")
    executions = re.findall(r"stat::number_of_executed_units:\s*(\d+)", text)
    coverage = re.findall(r"\bcov: (\d+)", text)
    print(
        f"{target:16} {'ok' if code == 0 else f'FAILED ({code})'}: {int((executions or ['0'])[-1]):,} executions, "
        f"{(coverage or ['0'])[-1]} edges covered, {len(list(corpus.iterdir()))} inputs kept",
        flush=True,
    )
    if code:
        print(*text.splitlines()[-40:], f"the whole log: {log}", sep="\n")
    return code == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=[*TARGETS, "all"])
    parser.add_argument("--seconds", type=int, default=600, help="for each target (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the fuzzer's random numbers (default: %(default)s)")
    args = parser.parse_args()
    chosen = TARGETS if args.target == "all" else [args.target]
    results = [fuzz(target, args.seconds, args.seed) for target in chosen]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
