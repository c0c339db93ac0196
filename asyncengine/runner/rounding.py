"""Errors that rounding makes in the results of a model's projections, on the inputs that a text gives them.

A text of stories of the bundled grammar runs through the model in one step, by plain torch and the weights as they are
stored. Each projection whose weight W would become V multiplies its own inputs x by both: the error is the norm of
(W - V) x in norms of W x, over all tokens. An expert's inputs are the tokens that are routed to it. With fp8 inputs
count as they are, although products of float8 round them too.

Weights go to the device of the products one at a time, so that a GPU needs no memory for the model. The rest of the
step is computed on the CPU.
"""

from __future__ import annotations

import logging
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncengine._core import StepBatch
from asyncengine.bundled.grammar import generate
from asyncengine.config import EngineConfig
from asyncengine.errors import ModelNotFoundError
from asyncengine.kernels.cpu.reference import ReferenceLinear, ReferenceOps
from asyncengine.kernels.float8 import Quantization, quantize
from asyncengine.kernels.grouped import round_to_groups, unpack
from asyncengine.kernels.weight import PackedWeight
from asyncengine.models.weights.formats.at_load import at_load
from asyncengine.models.weights.formats.base import Dense, TensorSource
from asyncengine.models.weights.shard import Part
from asyncengine.runner.state.kv_scales import fixed_prompt, one_prompt
from asyncengine.runner.steps.model_runner import load_model, read_model_config
from asyncengine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

TOKENS = 256
"""Tokens of the text, as far as the model's context goes."""


class Measured(NamedTuple):
    """The errors of a model's projections."""

    errors: dict[str, float]
    """By module, in the order in which the step came to it. An expert that no token was routed to is not there."""
    tokens: int
    text: bool
    """False: there is no tokenizer, and the tokens are random."""

    def summary(self) -> str:
        """A sentence: the median, and the largest error with the module that has it."""
        worst = max(self.errors, key=lambda module: self.errors[module])
        median, source = statistics.median(self.errors.values()), "a text" if self.text else "random tokens"
        return (
            f"{len(self.errors)} projections on {self.tokens} tokens of {source}: the median relative error of their "
            f"results is {100 * median:.2f}%, the largest {100 * self.errors[worst]:.2f}%, of {worst}"
        )


def measure(config: EngineConfig, quantization: Quantization, products: torch.device) -> Measured:
    """The errors of the model that ``config`` names, if its projections are rounded; ``products`` are on that device.

    Raises ModelError or a subclass if the model cannot be used, ConfigError if its weights are quantised already.
    """
    model = read_model_config(config)
    tokens = min(TOKENS, model.max_positions)
    ids, text = _read_text(config, model.vocab_size, tokens)
    form = _Named()
    ops = _MeasuringOps(form, quantization, products)
    plain = EngineConfig(
        model=config.model, revision=config.revision, load_format=config.load_format, seed=config.seed, device="cpu",
        dtype="float32" if config.dtype == "float16" else config.dtype, max_model_len=tokens, max_num_seqs=1,
    )  # fmt: skip
    loaded = load_model(plain, ops, dense_form=form)
    batch, [cache] = one_prompt(ids, loaded.config, loaded.dtype, ops)
    with torch.inference_mode():
        loaded.model.run(batch, cache.layers)
    return Measured(ops.errors(), len(ids), text)


def log_errors(config: EngineConfig, device: str) -> None:
    """Log the errors of ``config.quantization``, with products on a ``device``, "cpu" or "cuda". Raises as ``measure``
    does."""
    products = torch.device("cpu") if device == "cpu" else torch.device("cuda", config.device_index)
    measured = measure(config, config.quantization, products)
    for module, error in measured.errors.items():
        logger.debug("%s in %s: the results' relative error is %.2f%%", module, config.quantization, 100 * error)
    logger.info("%s, %s", config.quantization, measured.summary())


def _read_text(config: EngineConfig, vocab_size: int, tokens: int) -> tuple[list[int], bool]:
    """Ids of stories, one behind another; random ones without a tokenizer."""
    try:
        tokenizer = None if config.skip_tokenizer_init else Tokenizer.from_pretrained(
            config.tokenizer or config.model, revision=config.revision
        )  # fmt: skip
    except ModelNotFoundError:
        tokenizer = None
    if tokenizer is None:
        return fixed_prompt(vocab_size, tokens)[:tokens].tolist(), False
    rng = random.Random(0)
    ids = [token for token in tokenizer.encode(generate(rng)) if token < vocab_size]
    while len(ids) < tokens:
        story = tokenizer.encode("\n\n" + generate(rng), add_special_tokens=False)
        ids += [token for token in story if token < vocab_size]
    return ids[:tokens], True


class _Named(Dense):
    """A checkpoint of floats, of whose weights it is known which module each belongs to."""

    def __init__(self) -> None:
        self._modules: dict[int, tuple[str, PackedWeight]] = {}
        """By id of the weight, which is kept so that no other gets its id."""

    def weight(
        self, tensors: TensorSource, module: str, shape: tuple[int, int], part: Part, *, transposed: bool
    ) -> PackedWeight:
        made = super().weight(tensors, module, shape, part, transposed=transposed)
        self._modules[id(made)] = module, made
        return made

    def module_of(self, weight: PackedWeight) -> str | None:
        """The module of a weight that was read so; None for others."""
        found = self._modules.get(id(weight))
        return found and found[0]


@dataclass(frozen=True)
class _NamedLinear(ReferenceLinear):
    modules: tuple[str | None, ...]


class _MeasuringOps(ReferenceOps):
    """Operations in plain torch that measure what rounding would change in each product of a named weight."""

    def __init__(self, form: _Named, quantization: Quantization, device: torch.device) -> None:
        super().__init__()
        self._form, self._quantization, self._products = form, quantization, device
        self._squares: dict[str, list[float]] = {}
        """By module sums of squares: of what rounding changes in the results, and of the results."""

    def errors(self) -> dict[str, float]:
        return {module: (change / (size or 1.0)) ** 0.5 for module, (change, size) in self._squares.items()}

    def make_linear(self, weights: Sequence[PackedWeight], biases: Sequence[Tensor | None]) -> ReferenceLinear:
        made = super().make_linear(weights, biases)
        return _NamedLinear(made.weights, made.biases, made.form, tuple(map(self._form.module_of, weights)))

    def multiply(
        self, x: Tensor, handle: ReferenceLinear, batch: StepBatch, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        assert isinstance(handle, _NamedLinear)
        rows, parts = x.to(self._products).float(), []
        for module, stored, bias in zip(handle.modules, handle.weights, handle.biases, strict=True):
            weight = stored.to(self._products)
            y = F.linear(rows, weight.float())
            if module is not None:
                change = F.linear(rows, rounded(weight, self._quantization).sub_(weight))
                sums = self._squares.setdefault(module, [0.0, 0.0])
                sums[0] += change.square().sum().item()
                sums[1] += y.square().sum().item()
            parts.append(y.cpu() if bias is None else y.cpu() + bias.float())
        return torch.cat(parts, -1).to(out_dtype or x.dtype)


def rounded(weight: Tensor, quantization: Quantization) -> Tensor:
    """A weight [N, K] as it is after rounding, in float32."""
    if quantization == "fp8":
        return quantize(weight).dequantize()
    return unpack(round_to_groups(at_load(quantization).packed, weight))
