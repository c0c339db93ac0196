"""Entry point: one subcommand per module, imported light; torch comes when a command runs."""

from __future__ import annotations

import io
import os
import sys

from asyncengine.cli.parser import parse
from asyncengine.errors import AsyncEngineError, ConfigError, InvalidRequestError


def main(argv: list[str] | None = None) -> int:
    """Run the command line; the return value is the exit code."""
    _prepare_streams()
    try:
        args, run = parse(sys.argv[1:] if argv is None else argv)
        return run(args)
    except (ConfigError, InvalidRequestError) as exc:
        return _complain(exc, 2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing to flush at exit
        return 1
    except (AsyncEngineError, OSError) as exc:
        return _complain(exc, 1)
    except KeyboardInterrupt:
        return 130


def _prepare_streams() -> None:
    """Open closed standard streams, and accept undecodable input and unencodable output. Input bytes become surrogates,
    which the engine refuses; output characters are replaced."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # uvloop aborts when it is given a descriptor of these
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for good
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors=errors)


def _complain(exc: Exception, code: int) -> int:
    print(f"asyncengine: error: {exc}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
