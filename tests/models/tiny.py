"""Small random checkpoints and tokenizers, and a step driver that needs no native code."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from asyncengine.runner.steps.model_runner import CpuModelRunner
from tests.models.variants import DECODER as DECODER
from tests.models.variants import GPT2 as GPT2
from tests.models.variants import LLAMA3_ROPE as LLAMA3_ROPE
from tests.models.variants import LONG_ROPE as LONG_ROPE
from tests.models.variants import VARIANTS as VARIANTS
from tests.models.variants import VOCAB_SIZE as VOCAB_SIZE
from tests.models.variants import YARN_ROPE as YARN_ROPE


def _model_class(variant: str) -> Any:
    family = VARIANTS[variant][0]
    return getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")


def build_config(variant: str, **changes: Any) -> transformers.PretrainedConfig:
    """The configuration of ``build_model``."""
    settings = VARIANTS[variant][1] | changes
    config: transformers.PretrainedConfig = _model_class(variant).config_class(
        **settings, eos_token_id=None, bos_token_id=None
    )
    return config


def build_model(variant: str, seed: int = 0, **changes: Any) -> transformers.PreTrainedModel:
    """A random model in float32, norms and biases random as well, without end-of-sequence tokens."""
    config = build_config(variant, **changes)
    torch.manual_seed(seed)
    model = _model_class(variant)(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, 0, 0.2)
        elif parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1, 0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            torch.nn.init.normal_(buffer, 1, 0.2)
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            torch.nn.init.normal_(buffer, 0, 0.2)
    return model


def generate(model: transformers.PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """Return the tokens with which transformers continues the prompt, greedily."""
    ids = torch.tensor([list(prompt)])
    generate: Any = model.generate
    out = generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
        pad_token_id=0,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def followers(model: transformers.PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """Return what transformers, greedily, puts in the place of each of ``tokens``, behind the prompt and those before.

    That is ``tokens`` if and only if ``generate`` returns them. A single forward tells, where ``generate`` needs one
    for every token.
    """
    ids = torch.tensor([[*prompt, *tokens[:-1]]])
    with torch.inference_mode():
        return model(ids).logits[0, len(prompt) - 1 :].argmax(-1).tolist()


@dataclass
class Batch:
    """The Python twin of the native StepBatch."""

    input_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slot_mapping: npt.NDArray[np.int64]
    query_start: npt.NDArray[np.int32]
    context_len: npt.NDArray[np.int32]
    sample_index: npt.NDArray[np.int64]
    tables: list[npt.NDArray[np.int32]]
    slots: npt.NDArray[np.int32]
    needs: int = 0
    num_lanes: int = 0
    window_tables: list[list[npt.NDArray[np.int32]]] = field(default_factory=list)
    window_slots: list[npt.NDArray[np.int64]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_rows(self) -> int:
        return len(self.tables)

    @property
    def num_samples(self) -> int:
        return len(self.sample_index)

    def only_sampled(self) -> Batch:
        index = self.sample_index
        rows = np.searchsorted(self.query_start, index, side="right") - 1
        ones = np.arange(len(index) + 1)
        return Batch(
            self.input_ids[index], self.positions[index], self.slot_mapping[index], ones.astype(np.int32),
            self.positions[index].astype(np.int32), ones[:-1], [self.tables[row] for row in rows],
            self.slots[rows], self.needs,
            window_tables=[[tables[row] for row in rows] for tables in self.window_tables],
            window_slots=[slots[index] for slots in self.window_slots],
        )  # fmt: skip

    def block_table(self, row: int, num_blocks: int, group: int = 0) -> npt.NDArray[np.int32]:
        table = [self.tables, *self.window_tables][group][row]
        assert num_blocks <= len(table)
        return table[:num_blocks]

    def slots_of(self, group: int) -> npt.NDArray[np.int64]:
        return [self.slot_mapping, *self.window_slots][group]


def native_batch(batch: Batch) -> Any:
    """The same step as the native kernels take it."""
    from asyncengine import _core

    native = _core.StepBatch(
        batch.input_ids.tolist(), batch.positions.tolist(), batch.slot_mapping.tolist(),
        batch.query_start.tolist(), batch.context_len.tolist(), [t.tolist() for t in batch.tables],
        batch.sample_index.tolist(),
        window_tables=[[t.tolist() for t in tables] for tables in batch.window_tables],
        window_slots=[slots.tolist() for slots in batch.window_slots],
    )  # fmt: skip
    native.slots[:] = batch.slots
    return native


class TinySequence:
    """One sequence of a ``Driver``: its tokens, how many of them are computed, and a block table for each group."""

    def __init__(self, prompt: Sequence[int], blocks: list[list[int]], slot: int) -> None:
        self.tokens = list(prompt)
        self.prompt_len = len(prompt)
        self.computed = 0
        self.tables = [np.array(of_group, np.int32) for of_group in blocks]
        self.slot = slot

    @property
    def table(self) -> npt.NDArray[np.int32]:
        """The table of the layers that see all."""
        return self.tables[0]

    def places(self, group: int, span: range, block_size: int) -> list[int]:
        """Slots of these positions in the blocks of a group."""
        return [int(self.tables[group][p // block_size]) * block_size + p % block_size for p in span]

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_len :]


class Driver:
    """Runs a model step by step over randomly scattered blocks: decode rows first, then prefill chunks."""

    def __init__(self, runner: CpuModelRunner, seed: int = 0, *, native: bool = False) -> None:
        """``native`` gives the runner the batches that native kernels need."""
        self.runner = runner
        self.native = native
        self.num_groups = 1 + runner.info.window_groups
        self.random = random.Random(seed)
        self.free = list(range(runner.info.num_kv_blocks))
        self.random.shuffle(self.free)
        self.logits: list[torch.Tensor] = []
        self.num_slots = 0

    def add(self, prompt: Sequence[int], max_len: int) -> TinySequence:
        count = -(-max_len // self.runner.info.block_size)
        slot, self.num_slots = self.num_slots, self.num_slots + 1
        for address, size in self.runner.state_regions():
            ctypes.memset(address + slot * size, 0, size)
        blocks = [[self.free.pop() for _ in range(count)] for _ in range(self.num_groups)]
        return TinySequence(prompt, blocks, slot)

    def step(self, chunks: list[tuple[TinySequence, int]]) -> None:
        """Compute so many tokens of each sequence, and append the next token to those that are complete."""
        chunks = sorted(chunks, key=lambda c: len(c[0].tokens) - c[0].computed != 1)
        size = self.runner.info.block_size
        ids: list[int] = []
        positions: list[int] = []
        slots: list[list[int]] = [[] for _ in range(self.num_groups)]
        starts, contexts, samples = [0], [], []
        sampled: list[TinySequence] = []
        for sequence, count in chunks:
            span = range(sequence.computed, sequence.computed + count)
            ids += sequence.tokens[span.start : span.stop]
            positions += span
            for group in range(self.num_groups):
                slots[group] += sequence.places(group, span, size)
            contexts.append(span.start)
            starts.append(len(ids))
            sequence.computed = span.stop
            if span.stop == len(sequence.tokens):
                samples.append(len(ids) - 1)
                sampled.append(sequence)
        batch = Batch(
            np.array(ids, np.int64), np.array(positions, np.int64), np.array(slots[0], np.int64),
            np.array(starts, np.int32), np.array(contexts, np.int32), np.array(samples, np.int64),
            [sequence.table for sequence, _ in chunks], np.array([s.slot for s, _ in chunks], np.int32),
            window_tables=[[s.tables[group] for s, _ in chunks] for group in range(1, self.num_groups)],
            window_slots=[np.array(places, np.int64) for places in slots[1:]],
        )  # fmt: skip
        logits = self.runner.forward(native_batch(batch) if self.native else batch).logits
        if logits is None:
            assert not sampled
            return
        assert logits.shape == (len(sampled), self.runner.info.vocab_size)
        assert logits.dtype == torch.float32
        assert logits.is_contiguous()
        for sequence, row in zip(sampled, logits, strict=True):
            sequence.tokens.append(int(row.argmax()))
            self.logits.append(row.clone())

    def run(self, sequences: list[TinySequence], count: int, chunk: int | None) -> None:
        """Generate ``count`` tokens of each; ``chunk`` None draws the chunk sizes and who runs at random."""
        while True:
            chunks = []
            for sequence in sequences:
                left = len(sequence.tokens) - sequence.computed
                if len(sequence.generated) == count or (chunk is None and self.random.random() < 0.3):
                    continue
                chunks.append((sequence, min(left, chunk or self.random.randint(1, left))))
            if chunks:
                self.step(chunks)
            elif all(len(s.generated) == count for s in sequences):
                return


CORPUS = (
    "The quick brown fox jumps over the lazy dog. Once upon a time, in a small house, there lived a man.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Größe, Maß, façade, naïve, crème.",
    "def f(x):\n    return x ** 2  # squared\n\n\tif x > 10: print('many', x)\n",
    "日本語のテキストと中文文本。 Привет, мир! 1234567890 + 42 = ...",
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if message['role'] not in ['system', 'user', 'assistant'] %}\n"
    "        {{ raise_exception('unknown role ' ~ message['role']) }}\n"
    "    {% endif %}\n"
    "<|{{ message['role'] }}|>{{ message['content'] | trim }}{{ eos_token }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}\n<|assistant|>{% endif %}"
)


def byte_level_tokenizer(*, add_prefix_space: bool = False, vocab_size: int = 400, bos: bool = True) -> Tokenizer:
    """GPT-2's kind: BPE over bytes. With ``bos``, a template puts <s> in front, as in Llama 3."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<|user|>", "<|assistant|>"])
    tokenizer.add_tokens([AddedToken("two words"), AddedToken("Maß", normalized=False)])
    if bos:
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]),
            ]
        )
    return tokenizer


def metaspace_tokenizer(vocab_size: int = 400) -> Tokenizer:
    """Llama 2's kind: BPE over characters with ▁ for the space, other characters as <0xXX> byte tokens."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trained.train_from_iterator(CORPUS[:2], trainers.BpeTrainer(vocab_size=vocab_size - 259, show_progress=False))
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    pieces = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    vocab |= {piece: 259 + i for i, (piece, _) in enumerate(p for p in pieces if p[0] not in vocab)}
    import json

    merges = [tuple(m) for m in json.loads(trained.to_str())["model"]["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Written as transformers writes it, template file included."""
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=chat_template
    )
    fast.save_pretrained(directory)
    return directory
