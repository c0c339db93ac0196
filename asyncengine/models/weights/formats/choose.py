"""Choice of the format of a checkpoint's weights, by quantization_config of its config.json."""

from __future__ import annotations

from collections.abc import Callable

from asyncengine.errors import ConfigError
from asyncengine.kernels.float8 import Quantization
from asyncengine.models.config import RawConfig
from asyncengine.models.files import excerpt
from asyncengine.models.weights.formats.at_load import at_load
from asyncengine.models.weights.formats.awq import Awq
from asyncengine.models.weights.formats.base import WeightFormat
from asyncengine.models.weights.formats.bitsandbytes import BitsAndBytes
from asyncengine.models.weights.formats.compressed import CompressedTensors
from asyncengine.models.weights.formats.fp8 import Float8Blocks
from asyncengine.models.weights.formats.gptq import Gptq
from asyncengine.models.weights.formats.packed import Packed
from asyncengine.models.weights.formats.settings import QuantSettings

METHODS: dict[str, Callable[[QuantSettings], Packed]] = {
    "awq": Awq,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "fp8": Float8Blocks,
    "gptq": Gptq,
}
"""Formats of projections, by quant_method."""
MXFP4 = "mxfp4"
"""quant_method of experts alone, which their family reads."""


def quant_method(raw: RawConfig) -> str | None:
    """The method that made a checkpoint's weights; None: they are floats. Raises ModelError for another type."""
    settings = raw.get("quantization_config", dict, None)
    if settings is None:
        return None
    return str(RawConfig(settings, f"{raw.source}, quantization_config").get("quant_method", str))


def check_method(raw: RawConfig, known: tuple[str, ...]) -> None:
    """Raises UnsupportedModelError for a method that is not among these, by name."""
    method = quant_method(raw)
    if method is not None and method not in known:
        raise raw.unsupported(f"quantization_config with quant_method = {excerpt(method)}")


def choose_format(
    quantization: Quantization, raw: RawConfig | None = None, *, rounds_inputs: bool = False
) -> WeightFormat:
    """The format in which a checkpoint's weights lie, or one in which those of floats are wanted.

    ``rounds_inputs``: see ``Packed``.

    Raises UnsupportedModelError for settings that are not implemented, ConfigError for a ``quantization`` of weights
    that are quantised already.
    """
    method = None if raw is None else quant_method(raw)
    if raw is None or method is None:
        return at_load(quantization)
    if quantization != "none":
        raise ConfigError(f"quantization={quantization}: the checkpoint's weights are quantised already, by {method}")
    if method == MXFP4:
        return at_load("none")
    settings = QuantSettings(raw.values["quantization_config"], f"{raw.source}, quantization_config")
    form = METHODS[method](settings)
    form.rounds_inputs = rounds_inputs
    return form
