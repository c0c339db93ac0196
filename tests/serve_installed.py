"""An installed package serves: run it with the Python that a wheel was installed for, from any folder."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path

_TREE = Path(__file__).resolve().parents[1]
_LIMIT_S = 120


def main() -> None:
    """Start the server with the bundled model, ask it for a story, and end it. Raises where anything is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-P", "-c", "import asyncengine; print(asyncengine.__file__)"]
        package = Path(subprocess.check_output(command, cwd=folder, text=True).strip())
        assert not package.is_relative_to(_TREE / "asyncengine"), f"{package} is the source tree's, and not installed"
        command = [str(Path(sys.executable).with_name("asyncengine")), "serve", "--port", "0"]
        server = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
        limit = threading.Timer(_LIMIT_S, server.kill)
        limit.start()
        try:
            text = answer_of(server)
        finally:
            server.terminate()
            rest = server.communicate()[1]
            limit.cancel()
    assert server.returncode == 0, rest
    print(f"{package.parent} serves: {text!r}")


def answer_of(server: subprocess.Popen[str]) -> str:
    """The text of a completion by a server that starts."""
    assert server.stderr is not None
    log = ""
    for line in server.stderr:
        log += line
        if ready := re.search(r"ready on (http://\S+)", line):
            break
    else:
        raise AssertionError(f"the server did not start:\n{log}")
    body = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}
    request = urllib.request.Request(
        f"{ready[1]}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        answer = json.load(response)
    assert answer["usage"]["completion_tokens"] == 20
    return str(answer["choices"][0]["text"])


if __name__ == "__main__":
    main()
