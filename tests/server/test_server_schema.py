"""Requests made from the description of the API by schemathesis, right and wrong ones, over real sockets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import schemathesis
from harness import CHAT, COMPLETIONS
from hypothesis import HealthCheck, Phase, settings
from openapi import DESCRIPTION
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from threaded import Threaded, threaded

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
seen: Counter[tuple[str, int]] = Counter()
api = schemathesis.openapi.from_dict(DESCRIPTION)
api.config.generation.update(modes=[schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE])


@pytest.fixture(scope="module")
def server() -> Iterator[Threaded]:
    with threaded() as running:
        yield running
    print(seen)
    for route in (CHAT, COMPLETIONS):
        statuses = {status for path, status in seen if path == route}
        assert not statuses or {200, 400} <= statuses, f"only {statuses} from {route}"


@api.parametrize()
@settings(
    max_examples=40,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_every_answer_is_as_described(case: schemathesis.Case, server: Threaded) -> None:
    response = case.call(base_url=server.url)
    seen[case.operation.path, response.status_code] += 1
    case.validate_response(response, checks=CHECKS)
    server.check()


def test_the_description_has_every_route(server: Threaded) -> None:
    served = {path for path in server.site.server.app._routes if path != "/" and not path.startswith("/page/")}
    routes = {f"{path}{{id}}" if path.endswith("/") else path for path in served}  # without those for the page alone
    assert set(DESCRIPTION["paths"]) == routes
