"""Prometheus metrics under vLLM's names with an ``asyncengine:`` prefix.

The event loop is the only writer, so counters and histograms are plain numbers: an observation costs
0.3 µs instead of the several that locks and labels cost, which matters at one observation per token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import get_type_hints

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from asyncengine.api.outputs import FinishReason, RequestTiming, Usage
from asyncengine.api.stats import EngineStats, Exported
from asyncengine.server.engine_api import Engine, ModelInfo

_LABELS = ["model_name"]
PLACES = ("device", "host")
"""Places where a sequence decoded when a token was made: a label of latencies, as tokens on the host take longer."""
# fmt: off
_TOKEN_SECONDS = (.0005, .001, .0025, .005, .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1., 2.5)
_FIRST_TOKEN_SECONDS = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1., 2.5, 5., 10., 40.)
_REQUEST_SECONDS = (.001, .01, .05, .1, .3, .5, .8, 1., 1.5, 2.5, 5., 10., 20., 30., 60., 120., 600.)
_TOKENS = (1., 2., 5., 10., 20., 50., 100., 200., 500., 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6)
# fmt: on

_EXPORTED: list[tuple[str, Exported]] = [
    (field, mark)
    for field, hint in get_type_hints(EngineStats, include_extras=True).items()
    for mark in getattr(hint, "__metadata__", ())
]


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

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, as the exposition format wants them."""
        return _buckets(self.bounds, self.counts)


class Metrics(Collector):
    """Metrics that one server exports. ``engine`` answers None until the model is loaded."""

    def __init__(
        self, engine: Callable[[], Engine | None], model_name: Callable[[], str], body_bytes: Callable[[], int]
    ) -> None:
        self._engine = engine
        self._body_bytes = body_bytes
        self._model_name = model_name
        self.time_to_first_token = Histogram(_FIRST_TOKEN_SECONDS)
        self.inter_token_latency = {place: Histogram(_TOKEN_SECONDS) for place in PLACES}
        self.time_per_output_token = {place: Histogram(_TOKEN_SECONDS) for place in PLACES}
        self.e2e_latency = Histogram(_REQUEST_SECONDS)
        self.queue_time = Histogram(_REQUEST_SECONDS)
        self.prefill_time = Histogram(_REQUEST_SECONDS)
        self.decode_time = Histogram(_REQUEST_SECONDS)
        self.inference_time = Histogram(_REQUEST_SECONDS)
        self.request_prompt_tokens = Histogram(_TOKENS)
        self.request_generation_tokens = Histogram(_TOKENS)
        self.longest_generation = Histogram(_TOKENS)
        self.finished: dict[str, int] = dict.fromkeys((*FinishReason, "abort", "error"), 0)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def request_finished(self, timing: RequestTiming, usage: Usage) -> None:
        """A request ran to its end. TTFT is not among these: streams report it when it happens."""
        self.e2e_latency.observe(timing.e2e)
        self.queue_time.observe(timing.queue_time)
        self.prefill_time.observe(timing.first_token - timing.scheduled)
        self.decode_time.observe(timing.finished - timing.first_token)
        self.inference_time.observe(timing.finished - timing.scheduled)
        self.request_prompt_tokens.observe(usage.prompt_tokens)
        self.request_generation_tokens.observe(usage.completion_tokens)
        self.longest_generation.observe(timing.completion_tokens)
        self.time_per_output_token[timing.decoded_on].observe(timing.tpot)

    def tokens_came(self, seconds: float, count: int, host_tokens: int) -> None:
        """``count`` tokens of a stream came ``seconds`` after the ones before; of these, ``host_tokens`` are a host
        row's."""
        if here := count - host_tokens:
            self.inter_token_latency["device"].observe(seconds / count, here)
        if host_tokens:
            self.inter_token_latency["host"].observe(seconds / count, host_tokens)

    def render(self) -> bytes:
        """The text exposition format, version 0.0.4."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        return []  # registering must not call collect()

    def collect(self) -> Iterator[Metric]:
        label = [self._model_name()]

        engine = self._engine()
        if engine is not None:
            yield from _engine_metrics(engine.engine_stats(), label)
            yield _cache_config(engine.model_info, label)
        text = "Bytes of request bodies that are being received or parsed."
        held = GaugeMetricFamily("asyncengine:request_body_bytes", text, labels=_LABELS)
        held.add_metric(label, self._body_bytes())
        yield held
        labels = [*_LABELS, "finished_reason"]
        success = CounterMetricFamily("asyncengine:request_success", "Sequences by ending.", labels=labels)
        for reason, count in self.finished.items():
            success.add_metric([*label, reason], count)
        yield success
        for name, text, data in (
            ("time_to_first_token_seconds", "From arrival to the first token.", self.time_to_first_token),
            ("e2e_request_latency_seconds", "From arrival to the last token.", self.e2e_latency),
            ("request_queue_time_seconds", "From arrival to the first step.", self.queue_time),
            ("request_prefill_time_seconds", "From the first step to the first token.", self.prefill_time),
            ("request_decode_time_seconds", "From the first to the last token.", self.decode_time),
            ("request_inference_time_seconds", "From the first step to the last token.", self.inference_time),
            ("request_prompt_tokens", "Tokens of a prompt.", self.request_prompt_tokens),
            ("request_generation_tokens", "Tokens that a prompt's sequences made.", self.request_generation_tokens),
            ("request_max_num_generation_tokens", "Tokens of its longest sequence.", self.longest_generation),
        ):
            family = HistogramMetricFamily(f"asyncengine:{name}", text, labels=_LABELS)
            family.add_metric(label, data.buckets(), data.total)
            yield family
        for name, text, places in (
            ("inter_token_latency", "Between the tokens of a stream.", self.inter_token_latency),
            ("request_time_per_output_token", "Mean after the first token.", self.time_per_output_token),
        ):
            family = HistogramMetricFamily(f"asyncengine:{name}_seconds", text, labels=[*_LABELS, "decoded_on"])
            for place, data in places.items():
                family.add_metric([*label, place], data.buckets(), data.total)
            yield family


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    names = (*(str(float(bound)) for bound in bounds), "+Inf")
    return list(zip(names, accumulate(counts), strict=True))


def _engine_metrics(engines: Sequence[EngineStats], label: list[str]) -> Iterator[Metric]:
    """The statistics of one engine; of several, each with the label ``engine``, its number."""
    names = _LABELS if len(engines) == 1 else [*_LABELS, "engine"]
    each = [([*label, str(number)][: len(names)], stats) for number, stats in enumerate(engines)]
    for field, exported in _EXPORTED:
        name = f"asyncengine:{exported.name or field}"
        if exported.kind == "histogram":
            histogram = HistogramMetricFamily(name, exported.text, labels=names)
            for labels, stats in each:
                value = getattr(stats, field)
                histogram.add_metric(labels, _buckets(value.bounds, value.counts), value.total)
            yield histogram
            continue
        family = CounterMetricFamily if exported.kind == "counter" else GaugeMetricFamily
        metric = family(name, exported.text, labels=names)
        for labels, stats in each:
            metric.add_metric(labels, getattr(stats, field))
        yield metric


def _cache_config(model: ModelInfo, label: list[str]) -> Metric:
    """A gauge that is always 1, whose labels say how large the cache is, as routers and dashboards read it."""
    labels = [*_LABELS, "block_size", "num_gpu_blocks"]
    family = GaugeMetricFamily("asyncengine:cache_config_info", "The KV cache, in labels.", labels=labels)
    family.add_metric([*label, str(model.block_size), str(model.num_kv_blocks)], 1)
    return family
