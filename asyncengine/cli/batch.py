"""A file of requests through a server's endpoints, to a file of results: what generate and run-batch share."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from asyncengine.cli import flags
from asyncengine.cli.embed import engine_from, loop_factory, running
from asyncengine.cli.jsonl import Request, Results, keys_of, numbered_lines
from asyncengine.config import EngineConfig
from asyncengine.errors import ConfigError

if TYPE_CHECKING:
    from asyncengine.cli.remote import Remote, Reply

_LONGEST_SHOWN = 300


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings for working through a file. Wrong values raise ConfigError."""

    max_in_flight: int = 256
    """Requests of the file under way at most."""
    retry_failed: bool = False
    """Send again what failed in an earlier run."""
    url: str | None = None
    """Server to ask, http://HOST:PORT or unix:PATH. It answers in place of an engine in this process; --model is then
    the name that it knows the model by, or else the first that it lists."""
    api_key: str | None = field(default=None, repr=False)
    """Key of that server."""

    def __post_init__(self) -> None:
        if self.max_in_flight < 1:
            raise ConfigError(f"max_in_flight must be at least 1, got {self.max_in_flight}")


class Format(ABC):
    """The two kinds of lines."""

    @abstractmethod
    def request(self, number: int, line: bytes) -> Request:
        """Line ``number`` of the input. Raises ConfigError for one that no result could be given of."""

    @abstractmethod
    def result(self, request: Request, reply: Reply | None) -> dict[str, Any]:
        """Line of the output; ``reply`` is None for a request with a ``problem``."""


def add_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    group = parser.add_argument_group("files")
    group.add_argument("-i", "--input", metavar="FILE", default=argparse.SUPPRESS, help=what)
    group.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="File for the results. A file of an earlier run is continued: requests with a result are not sent again.",
    )
    flags.add_dataclass(parser, Options, "requests", common=("retry_failed", "url", "api_key"))


def run(args: argparse.Namespace, form: Format, serving: Mapping[str, Any]) -> int:
    """Work through the file; returns the exit code, 1 if a request failed in this run or an earlier one.

    ``serving``: keywords of ServerConfig for an engine of this process."""
    options = Options(**flags.values(args, Options))
    source, target = _files(args)
    if options.url is not None:
        warn_of_idle_flags(args)

    def requests() -> Iterator[Request]:
        return (form.request(number, line) for number, line in numbered_lines(source))

    keys = keys_of(source, requests())
    with Results(target, keys, retry_failed=options.retry_failed) as results:
        before = results.done
        try:
            if before < len(keys):
                with asyncio.Runner(loop_factory=loop_factory()) as runner:
                    todo = (request for request in requests() if request.key not in results)
                    runner.run(_answer(args, options, form, todo, results, serving))
            results.put_in_order()
        finally:
            _report(results, before, len(keys))
        return 1 if results.failed else 0


def warn_of_idle_flags(args: argparse.Namespace) -> None:
    """Warn of the options that have no effect with --url."""
    idle = [f"--{name.replace('_', '-')}" for name in flags.values(args, EngineConfig) if name != "model"]
    if idle:
        print(f"asyncengine: without effect, as --url is given: {', '.join(idle)}", file=sys.stderr)


def _files(args: argparse.Namespace) -> tuple[str, str]:
    for name in ("input", "output"):
        if name not in args:
            raise ConfigError(f"--{name} FILE is needed")
    source, target = args.input, args.output
    if os.path.exists(source) and os.path.exists(target) and os.path.samefile(source, target):
        raise ConfigError(f"input and output are the same file: {source}")
    return source, target


def _report(results: Results, before: int, total: int) -> None:
    skipped = f", {before} of them in earlier runs" if before else ""
    print(f"{results.done} of {total} requests have a result{skipped}, {results.failed} failed", file=sys.stderr)
    if results.failed:
        print(f"first failure: {results.first_failure[:_LONGEST_SHOWN]}", file=sys.stderr)
    if 0 < results.done < total:
        print("the same command goes on from here", file=sys.stderr)


async def _answer(
    args: argparse.Namespace,
    options: Options,
    form: Format,
    todo: Iterator[Request],
    results: Results,
    serving: Mapping[str, Any],
) -> None:
    from tqdm import tqdm

    async with _remote(args, options, serving) as (remote, default):
        bar = tqdm(total=results.done + results.missing, initial=results.done, unit=" requests", disable=None)

        async def work() -> None:
            for request in todo:  # shared by all workers
                reply = None
                if request.fields is not None:
                    reply = await remote.post(request.path, default | request.fields)
                results.add(form.result(request, reply))
                bar.update()
                bar.set_postfix(failed=results.failed, refresh=False)

        with bar:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(options.max_in_flight, results.missing)):
                        group.create_task(work())
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None


@asynccontextmanager
async def _remote(
    args: argparse.Namespace, options: Options, serving: Mapping[str, Any]
) -> AsyncIterator[tuple[Remote, dict[str, Any]]]:
    """The server to ask, and what a request that does not name its model is sent with."""
    from asyncengine.cli.remote import Remote, served_here

    if options.url is not None:
        async with Remote(options.url, options.api_key) as remote:
            yield remote, {"model": getattr(args, "model", None) or await remote.first_model()}
    else:
        async with running(engine_from(args)) as engine, served_here(engine, serving) as remote:
            yield remote, {}
