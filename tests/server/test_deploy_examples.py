"""The examples for Kubernetes, Compose and nginx have known fields alone, and fit the server."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

import pytest
import yaml

from asyncengine.cli.parser import parse
from asyncengine.server.app import App
from asyncengine.server.config import ServerConfig

FOLDER = files("asyncengine.server.deploy")

_PROBE = {
    "httpGet": {"path": str, "port": str}, "periodSeconds": int, "timeoutSeconds": int, "failureThreshold": int,
}  # fmt: skip
_META: dict[str, Any] = {"name": str, "labels": {"app": str}, "annotations": None}
_ENV = {"name": str, "value": str, "valueFrom": {"secretKeyRef": {"name": str, "key": str}}}
_CONTAINER = {
    "name": str,
    "image": str,
    "args": [str],
    "env": [_ENV],
    "ports": [{"name": str, "containerPort": int}],
    **dict.fromkeys(("startupProbe", "livenessProbe", "readinessProbe"), _PROBE),
    "lifecycle": {"preStop": {"exec": {"command": [str]}}},
    "resources": {"requests": {"cpu": str, "memory": str}, "limits": {"nvidia.com/gpu": str}},
    "securityContext": {"allowPrivilegeEscalation": bool, "capabilities": {"drop": [str]}},
    "volumeMounts": [{"name": str, "mountPath": str}],
}
_POD = {
    "terminationGracePeriodSeconds": int,
    "securityContext": {"runAsNonRoot": bool, "runAsUser": int, "fsGroup": int},
    "containers": [_CONTAINER],
    "volumes": [{"name": str, "persistentVolumeClaim": {"claimName": str}}],
}
_SPECS: dict[tuple[str, str], Any] = {
    ("apps/v1", "Deployment"): {
        "replicas": int,
        "selector": {"matchLabels": {"app": str}},
        "template": {"metadata": _META, "spec": _POD},
    },
    ("v1", "PersistentVolumeClaim"): {"accessModes": [str], "resources": {"requests": {"storage": str}}},
    ("v1", "Service"): {"selector": {"app": str}, "ports": [{"name": str, "port": int, "targetPort": str}]},
}
"""Fields of Kubernetes' API by kind, as far as the example may use them."""

_COMPOSE = {
    "services": {
        "asyncengine": {
            "build": {"context": str, "dockerfile": str},
            "image": str,
            "command": [str],
            "environment": {"ASYNCENGINE_API_KEY": str},
            "ports": [str],
            "volumes": [str],
            "stop_grace_period": str,
            "restart": str,
            "deploy": {
                "resources": {"reservations": {"devices": [{"driver": str, "count": str, "capabilities": [str]}]}}
            },
        }
    },
    "volumes": {"cache": {}},
}
"""Fields of the Compose specification, as far as the example may use them."""


def check(value: Any, known: Any, where: str) -> None:
    """Assert that a document has known fields alone, and values of their types."""
    if known is None:
        return
    if isinstance(known, list):
        assert isinstance(value, list), where
        for member in value:
            check(member, known[0], where)
    elif isinstance(known, dict):
        assert isinstance(value, dict), where
        assert value.keys() <= known.keys(), where
        for name, member in value.items():
            check(member, known[name], f"{where}.{name}")
    else:
        assert type(value) is known, where


def objects() -> dict[str, Any]:
    return {document["kind"]: document for document in yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())}


def seconds(text: str) -> int:
    return int(text.removesuffix("s"))


def test_kubernetes_knows_every_field() -> None:
    found = objects()
    assert {(each["apiVersion"], each["kind"]) for each in found.values()} == _SPECS.keys()
    for each in found.values():
        spec = _SPECS[each["apiVersion"], each["kind"]]
        check(each, {"apiVersion": str, "kind": str, "metadata": _META, "spec": spec}, each["kind"])
    deployment, service = found["Deployment"]["spec"], found["Service"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == labels == service["selector"]
    [volume] = deployment["template"]["spec"]["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == found["PersistentVolumeClaim"]["metadata"]["name"]


def test_the_pod_fits_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    pod = objects()["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    args, _ = parse(["serve", *container["args"]])
    assert (args.metrics_prefix, args.public_metrics) == ("vllm", True)
    assert capsys.readouterr().err == ""
    routes = App(ServerConfig(api_key="secret"))._public
    for probe, path in {"startupProbe": "/ready", "livenessProbe": "/live", "readinessProbe": "/ready"}.items():
        assert container[probe]["httpGet"] == {"path": path, "port": container["ports"][0]["name"]}
        assert path in routes  # a probe has no key
    dockerfile = (FOLDER / "Dockerfile").read_text()
    assert f"EXPOSE {container['ports'][0]['containerPort']}\n" in dockerfile
    assert f"USER {pod['securityContext']['runAsUser']}\n" in dockerfile
    assert f"VOLUME {container['volumeMounts'][0]['mountPath']}\n" in dockerfile
    command, pause = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    assert pod["terminationGracePeriodSeconds"] >= int(pause) + ServerConfig().shutdown_timeout_s + 10


def test_compose_knows_every_field() -> None:
    document = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    check(document, _COMPOSE, "compose.yaml")
    [service] = document["services"].values()
    root = FOLDER.joinpath(service["build"]["context"])
    assert root.joinpath(service["build"]["dockerfile"]).read_text() == (FOLDER / "Dockerfile").read_text()
    assert seconds(service["stop_grace_period"]) >= ServerConfig().shutdown_timeout_s + 10
    [volume] = service["volumes"]
    name, path = volume.split(":")
    assert name in document["volumes"]
    assert f"VOLUME {path}\n" in (FOLDER / "Dockerfile").read_text()


def test_nginx_passes_events_on_at_once() -> None:
    crossplane = pytest.importorskip("crossplane")
    # A file of conf.d stands in the context http: the analyser knows which directives may.
    parsed = crossplane.parse(str(FOLDER / "nginx.conf"), check_ctx=False, strict=True)
    assert parsed["errors"] == []
    upstream, server = parsed["config"][0]["parsed"]
    for block, context in ((upstream, ("http", "upstream")), (server, ("http", "server"))):
        for line in block["block"]:
            crossplane.analyzer.analyze("nginx.conf", line, ";" if "block" not in line else "{", context, strict=True)
    [location] = [line for line in server["block"] if line["directive"] == "location"]
    for line in location["block"]:
        crossplane.analyzer.analyze("nginx.conf", line, ";", ("http", "location"), strict=True)
    said = {line["directive"]: line["args"] for line in location["block"]}
    assert said["proxy_buffering"] == ["off"]
    assert said["proxy_http_version"] == ["1.1"]
    assert said["proxy_pass"] == [f"http://{upstream['args'][0]}"]
    [size] = [line["args"] for line in server["block"] if line["directive"] == "client_max_body_size"]
    assert re.fullmatch(r"\d+m", size[0])
    assert int(size[0][:-1]) << 20 == ServerConfig().max_request_bytes
