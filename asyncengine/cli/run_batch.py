"""``asyncengine run-batch``: files in the format of OpenAI's Batch API, through the server's endpoints."""

from __future__ import annotations

import argparse
import json
import uuid
from typing import TYPE_CHECKING, Any

from asyncengine.cli import batch
from asyncengine.cli.embed import BUNDLED_MODEL_NAME, add_engine, add_model
from asyncengine.cli.jsonl import Request
from asyncengine.errors import ConfigError

if TYPE_CHECKING:
    from asyncengine.cli.remote import Reply


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] -i FILE -o FILE [options]"
    add_model(parser)
    batch.add_arguments(
        parser,
        "Requests as JSON, one a line. It has custom_id, method (POST), url (such as /v1/chat/completions) and body.",
    )
    parser.add_argument(
        "--served-model-name",
        metavar="TEXT",
        default=argparse.SUPPRESS,
        help="name that the requests have for the model (default: the model's own)",
    )
    add_engine(parser)


def run(args: argparse.Namespace) -> int:
    default = None if "model" in args else BUNDLED_MODEL_NAME
    return batch.run(args, BatchLines(), {"served_model_name": getattr(args, "served_model_name", default)})


class BatchLines(batch.Format):
    """Lines of batch files as OpenAI documents them. A request that the server refuses has a response; ``error`` is for
    a request that is not sent."""

    def request(self, number: int, line: bytes) -> Request:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as exc:
            raise ConfigError(f"line {number} of the input is no JSON: {exc}") from None
        key = fields.get("custom_id") if isinstance(fields, dict) else None
        if not isinstance(key, str):
            raise ConfigError(f"line {number} of the input needs a custom_id, a string")
        url, body = fields.get("url"), fields.get("body")
        if fields.get("method", "POST") != "POST":
            return Request(key, problem="method must be POST")
        if not isinstance(url, str) or not url.startswith("/v1/"):
            return Request(key, problem="url must be a path such as /v1/chat/completions")
        if not isinstance(body, dict):
            return Request(key, problem="body must be an object")
        if body.get("stream"):
            return Request(key, problem="stream is not possible in a batch")
        return Request(key, url, body)

    def result(self, request: Request, reply: Reply | None) -> dict[str, Any]:
        head = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": request.key}
        if reply is None:
            return head | {"response": None, "error": {"code": "invalid_request", "message": request.problem}}
        response = {"status_code": reply.status, "request_id": reply.request_id, "body": reply.body}
        return head | {"response": response, "error": None}
