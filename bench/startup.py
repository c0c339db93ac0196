"""Time from process start to the first healthy answer, beside the import of torch.

    python bench/startup.py [--json FILE]

The server is ``asyncengine serve`` with the bundled model; it counts as up when GET /health answers 200. Runs are
interleaved with ``python -c "import torch"``, all with warm file caches.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

from quiet import wait_for_quiet

from asyncengine.cli.benchmarks import report
from asyncengine.cli.benchmarks.report import Figure, median

_POLL_S = 0.005
_LIMIT_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--wait", type=float, default=30, metavar="S", help="for a quiet machine, before each pair")
    parser.add_argument("--json", default="bench/results/startup.json")
    args = parser.parse_args()
    rounds = []
    for i in range(-1, args.repeats):  # the first warms the file caches
        quiet = wait_for_quiet(args.wait)
        seconds = {"import torch": time_import(), "healthy": time_server(), "quiet": quiet}
        if i >= 0:
            rounds.append(seconds)
    imports, healthy = (median([r[name] for r in rounds]) for name in ("import torch", "healthy"))
    figures = [
        Figure("import torch", imports, "s"),
        Figure("serve to /health 200", healthy, "s", at_most=1.5 * imports + 2),
        Figure("of import torch", median([r["healthy"] / r["import torch"] for r in rounds]), "x"),
    ]
    report.print_figures(f"Start-up with the bundled model (medians of {args.repeats})", figures)
    report.write(args.json, report.record("startup", figures, repeats=args.repeats, settings={}, rounds=rounds))


def time_import() -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - start


def time_server() -> float:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "asyncengine.cli.main", "serve", "--port", str(port), "--log-level", "error"]
    start = time.perf_counter()
    with subprocess.Popen(command) as server:
        try:
            while not healthy(port):
                if server.poll() is not None or time.perf_counter() - start > _LIMIT_S:
                    raise SystemExit("the server did not come up")
                time.sleep(_POLL_S)
            return time.perf_counter() - start
        finally:
            server.terminate()


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):  # nobody listens yet, or 503: the model is loading
        return False


if __name__ == "__main__":
    main()
