"""Prometheus metrics under vLLM's names with an ``asyncengine:`` prefix, or in vLLM's own form.

The event loop is the only writer, so counters and histograms are plain numbers: an observation costs
0.3 µs instead of the several that locks and labels cost, which matters at one observation per token.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple, get_type_hints

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from asyncengine.api.outputs import FinishReason, RequestTiming, Usage
from asyncengine.api.stats import EngineStats, Exported
from asyncengine.server.engine_api import Engine, ModelInfo

PLACES = ("device", "host")
"""Places where a sequence decoded when a token was made: a label of latencies, as tokens on the host take longer."""
MetricsPrefix = Literal["asyncengine", "vllm"]


class _Bounds(NamedTuple):
    """Upper bounds of the buckets of histograms, in seconds or tokens."""

    token: tuple[float, ...]
    first_token: tuple[float, ...]
    request: tuple[float, ...]
    tokens: tuple[float, ...]


# fmt: off
_TOKENS = (1., 2., 5., 10., 20., 50., 100., 200., 500., 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6)
_BOUNDS: dict[MetricsPrefix, _Bounds] = {
    "asyncengine": _Bounds(
        token=(.0005, .001, .0025, .005, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1., 2.5),
        first_token=(.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1., 2.5, 5., 10., 40.),
        request=(.001, .01, .05, .1, .3, .5, .8, 1., 1.5, 2.5, 5., 10., 20., 30., 60., 120., 600.),
        tokens=_TOKENS,
    ),
    "vllm": _Bounds(
        token=(.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1., 2.5, 5., 7.5, 10., 20., 40., 80.),
        first_token=(.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1., 2.5, 5., 7.5, 10., 20., 40., 80., 160.,
                     640., 2560.),
        request=(.3, .5, .8, 1., 1.5, 2., 2.5, 5., 10., 15., 20., 30., 40., 50., 60., 120., 240., 480., 960., 1920.,
                 7680.),
        tokens=(*_TOKENS, 2e6, 5e6, 1e7),
    ),
}
_OF_VLLM = frozenset((
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions", "prompt_tokens",
    "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "iteration_tokens_total",
))
# fmt: on
"""Statistics of engines that vLLM exports too, with the same meaning. The others keep the prefix ``asyncengine``."""

_EXPORTED: list[tuple[str, Exported]] = [
    (field, mark)
    for field, hint in get_type_hints(EngineStats, include_extras=True).items()
    for mark in getattr(hint, "__metadata__", ())
]


_HISTOGRAMS = (
    ("time_to_first_token_seconds", "From arrival to the first token.", "time_to_first_token"),
    ("e2e_request_latency_seconds", "From arrival to the last token.", "e2e_latency"),
    ("request_queue_time_seconds", "From arrival to the first step.", "queue_time"),
    ("request_prefill_time_seconds", "From the first step to the first token.", "prefill_time"),
    ("request_decode_time_seconds", "From the first to the last token.", "decode_time"),
    ("request_inference_time_seconds", "From the first step to the last token.", "inference_time"),
    ("request_prompt_tokens", "Tokens of a prompt.", "prompt_tokens"),
    ("request_generation_tokens", "Tokens that a prompt's sequences made.", "generation_tokens"),
    ("request_max_num_generation_tokens", "Tokens of its longest sequence.", "longest_generation"),
)
_HISTOGRAMS_BY_PLACE = (
    ("inter_token_latency_seconds", "Between the tokens of a stream.", "inter_token_latency"),
    ("request_time_per_output_token_seconds", "Mean after the first token.", "time_per_output_token"),
)
"""Names, help texts and fields of RequestMetrics."""


class Histogram:
    """Counts per bucket, and the sum, of values in seconds or tokens."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self, most: float = math.inf) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, as the exposition format wants them. ``most``: no value is above it, and
        bounds above it are left out."""
        used = bisect_right(self.bounds, most)
        return _buckets(self.bounds[:used], (*self.counts[:used], sum(self.counts[used:])))


class RequestMetrics:
    """Histograms and counts of the requests that one engine served."""

    def __init__(self, prefix: MetricsPrefix) -> None:
        bounds = _BOUNDS[prefix]
        self.time_to_first_token = Histogram(bounds.first_token)
        self.inter_token_latency = {place: Histogram(bounds.token) for place in PLACES}
        self.time_per_output_token = {place: Histogram(bounds.token) for place in PLACES}
        self.e2e_latency = Histogram(bounds.request)
        self.queue_time = Histogram(bounds.request)
        self.prefill_time = Histogram(bounds.request)
        self.decode_time = Histogram(bounds.request)
        self.inference_time = Histogram(bounds.request)
        self.prompt_tokens = Histogram(bounds.tokens)
        self.generation_tokens = Histogram(bounds.tokens)
        self.longest_generation = Histogram(bounds.tokens)
        self.finished: dict[str, int] = dict.fromkeys((*FinishReason, "abort", "error"), 0)

    def request_finished(self, timing: RequestTiming, usage: Usage) -> None:
        """A request ran to its end. TTFT is not among these: streams report it when it happens."""
        self.e2e_latency.observe(timing.e2e)
        self.queue_time.observe(timing.queue_time)
        self.prefill_time.observe(timing.first_token - timing.scheduled)
        self.decode_time.observe(timing.finished - timing.first_token)
        self.inference_time.observe(timing.finished - timing.scheduled)
        self.prompt_tokens.observe(usage.prompt_tokens)
        self.generation_tokens.observe(usage.completion_tokens)
        self.longest_generation.observe(timing.completion_tokens)
        self.time_per_output_token[timing.decoded_on].observe(timing.tpot)

    def tokens_came(self, seconds: float, count: int, host_tokens: int) -> None:
        """``count`` tokens of a stream came ``seconds`` after the ones before; of these, ``host_tokens`` are a host
        row's."""
        if here := count - host_tokens:
            self.inter_token_latency["device"].observe(seconds / count, here)
        if host_tokens:
            self.inter_token_latency["host"].observe(seconds / count, host_tokens)


class Metrics(Collector):
    """Metrics that one server exports. ``engine`` answers None until the model is loaded."""

    def __init__(
        self,
        engine: Callable[[], Engine | None],
        model_name: Callable[[], str],
        body_bytes: Callable[[], int],
        prefix: MetricsPrefix = "asyncengine",
    ) -> None:
        self._engine = engine
        self._body_bytes = body_bytes
        self._model_name = model_name
        self._prefix = prefix
        self.each = [RequestMetrics(prefix)]
        """By the engine's number. A request that no engine has begun is counted for the first."""
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def of(self, engine: int) -> RequestMetrics:
        """Metrics of the requests of an engine. Its number is one of data_parallel_size."""
        while len(self.each) <= engine:
            self.each.append(RequestMetrics(self._prefix))
        return self.each[engine]

    def render(self) -> bytes:
        """The text exposition format, version 0.0.4."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        return []  # registering must not call collect()

    def collect(self) -> Iterator[Metric]:
        prefix, name = self._prefix, self._model_name()
        engine, count = self._engine(), len(self.each)
        if engine is not None:
            stats = engine.engine_stats()
            count = max(count, len(stats))
            yield from _engine_metrics(stats, prefix, name)
            yield _cache_config(engine.model_info, len(stats), prefix, name)
        # vLLM's buckets of tokens end with the context.
        most_tokens = engine.model_info.max_model_len if engine is not None and prefix == "vllm" else math.inf
        text = "Bytes of request bodies that are being received or parsed."
        held = GaugeMetricFamily("asyncengine:request_body_bytes", text, labels=["model_name"])
        held.add_metric([name], self._body_bytes())
        yield held
        names, labels = _engine_labels(count, prefix, name)
        yield from _request_metrics([self.of(number) for number in range(count)], prefix, names, labels, most_tokens)


def load_of(stats: EngineStats) -> dict[str, float]:
    """The answer of /load. ``server_load`` is in requests, and ``kv_cache_usage`` a share of 1."""
    return {
        "server_load": stats.num_requests_running + stats.num_requests_waiting,
        "num_requests_running": stats.num_requests_running,
        "num_requests_waiting": stats.num_requests_waiting,
        "queued_tokens": stats.queued_tokens,
        "kv_cache_usage": stats.kv_cache_usage,
    }


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    names = (*(str(float(bound)) for bound in bounds), "+Inf")
    return list(zip(names, accumulate(counts), strict=True))


def _sum(parts: Iterable[Histogram]) -> Histogram:
    """Add up histograms of the same bounds."""
    parts = list(parts)
    total = Histogram(parts[0].bounds)
    total.counts = [sum(column) for column in zip(*(part.counts for part in parts), strict=True)]
    total.total = sum(part.total for part in parts)
    return total


def _engine_labels(count: int, prefix: MetricsPrefix, model: str) -> tuple[list[str], list[list[str]]]:
    """The names of labels, and the values of each engine: its number is among them if there are several, and always in
    vLLM's form."""
    if count == 1 and prefix == "asyncengine":
        return ["model_name"], [[model]]
    return ["model_name", "engine"], [[model, str(number)] for number in range(count)]


def _engine_metrics(engines: Sequence[EngineStats], prefix: MetricsPrefix, model: str) -> Iterator[Metric]:
    names, each = _engine_labels(len(engines), prefix, model)
    for field, exported in _EXPORTED:
        suffix = exported.name or field
        name = f"{prefix if suffix in _OF_VLLM else 'asyncengine'}:{suffix}"
        if exported.kind == "histogram":
            histogram = HistogramMetricFamily(name, exported.text, labels=names)
            for labels, stats in zip(each, engines, strict=True):
                value = getattr(stats, field)
                histogram.add_metric(labels, _buckets(value.bounds, value.counts), value.total)
            yield histogram
            continue
        family = CounterMetricFamily if exported.kind == "counter" else GaugeMetricFamily
        metric = family(name, exported.text, labels=names)
        for labels, stats in zip(each, engines, strict=True):
            metric.add_metric(labels, getattr(stats, field))
        yield metric


def _request_metrics(
    each: Sequence[RequestMetrics],
    prefix: MetricsPrefix,
    names: list[str],
    labels: list[list[str]],
    most_tokens: float,
) -> Iterator[Metric]:
    success = CounterMetricFamily(
        f"{prefix}:request_success", "Sequences by ending.", labels=[*names, "finished_reason"]
    )
    for label, metrics in zip(labels, each, strict=True):
        for reason, count in metrics.finished.items():
            success.add_metric([*label, reason], count)
    yield success
    for suffix, text, field in _HISTOGRAMS:
        family = HistogramMetricFamily(f"{prefix}:{suffix}", text, labels=names)
        for label, metrics in zip(labels, each, strict=True):
            data = getattr(metrics, field)
            most = most_tokens if data.bounds is _BOUNDS[prefix].tokens else math.inf
            family.add_metric(label, data.buckets(most), data.total)
        yield family
    for suffix, text, field in _HISTOGRAMS_BY_PLACE:
        split = prefix != "vllm"
        family = HistogramMetricFamily(f"{prefix}:{suffix}", text, labels=[*names, "decoded_on"] if split else names)
        for label, metrics in zip(labels, each, strict=True):
            places = getattr(metrics, field)
            apart = [([place], data) for place, data in places.items()] if split else [([], _sum(places.values()))]
            for place, data in apart:
                family.add_metric([*label, *place], data.buckets(), data.total)
        yield family


def _cache_config(model: ModelInfo, engines: int, prefix: MetricsPrefix, name: str) -> Metric:
    """A gauge that is always 1, whose labels say how large the cache is, as routers and dashboards read it."""
    names, each = _engine_labels(engines if prefix == "vllm" else 1, prefix, name)
    sizes = {"block_size": model.block_size, "num_gpu_blocks": model.num_kv_blocks}
    if prefix != "vllm":
        sizes["bytes_per_sequence"] = model.kv_bytes_per_sequence
    text = "The KV cache, in labels."
    family = GaugeMetricFamily(f"{prefix}:cache_config_info", text, labels=[*names, *sizes])
    for labels in each:
        family.add_metric([*labels, *map(str, sizes.values())], 1)
    return family
