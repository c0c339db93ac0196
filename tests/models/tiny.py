"""Small random checkpoints and tokenizers, and a step driver that needs no native code."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
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
from tests.models.mixtures import MIXTURES

VOCAB_SIZE = 199

GPT2 = {
    "vocab_size": VOCAB_SIZE, "n_positions": 128, "n_embd": 60, "n_layer": 3, "n_head": 5,
    "initializer_range": 0.3,
}  # fmt: skip
DECODER = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "initializer_range": 0.3,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 10000.0,
}  # fmt: skip
YARN_ROPE = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 8.0,
    "rope_theta": 10000.0,
}  # fmt: skip

GEMMA = DECODER | {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24, "pad_token_id": None}
LONG_ROPE = {
    "rope_type": "longrope", "original_max_position_embeddings": 32, "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.5, 2.0], "long_factor": [1.0, 1.4, 3.0, 4.0],
}  # fmt: skip

#: name → (family as transformers calls it, settings)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2),
    "gpt2-untied-scaled": (
        "GPT2",
        GPT2
        | {
            "tie_word_embeddings": False, "scale_attn_by_inverse_layer_idx": True, "n_inner": 100,
            "activation_function": "gelu",
        },
    ),
    "llama": ("Llama", DECODER),
    "llama-odd-heads-biased": (
        "Llama",
        DECODER
        | {
            "hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1, "attention_bias": True,
            "mlp_bias": True, "tie_word_embeddings": True,
        },
    ),
    "llama-rope-linear": (
        "Llama", DECODER | {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0}},
    ),
    "llama-rope-dynamic": (
        "Llama", DECODER | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 9000.0}},
    ),
    "llama-rope-llama3": ("Llama", DECODER | {"rope_parameters": LLAMA3_ROPE, "head_dim": 16}),
    "llama-rope-yarn": ("Llama", DECODER | {"rope_parameters": YARN_ROPE, "head_dim": 16}),
    "mistral-window": ("Mistral", DECODER | {"sliding_window": 7}),
    "mistral-no-window": ("Mistral", DECODER | {"sliding_window": None, "head_dim": 12}),
    "qwen2": ("Qwen2", DECODER | {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        DECODER | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", DECODER | {"head_dim": 20, "tie_word_embeddings": True}),
    "qwen3-window-biased": (
        "Qwen3",
        DECODER
        | {
            "head_dim": 16, "use_sliding_window": True, "sliding_window": 5, "attention_bias": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 9.0}),
    "gemma2-uncapped-biased": (
        "Gemma2",
        GEMMA
        | {
            "hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 1, "attention_bias": True,
            "attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "gemma3": ("Gemma3", GEMMA | {"num_hidden_layers": 6, "initializer_range": 0.15}),
    "gemma3-scaled": (
        "Gemma3",
        GEMMA
        | {
            "head_dim": 12, "num_key_value_heads": 3, "final_logit_softcapping": 20.0, "attention_bias": True,
            "tie_word_embeddings": False,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 90000.0},
            },
        },
    ),
    "phi3": (
        "Phi3",
        DECODER
        | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}, "pad_token_id": None},
    ),
    "phi3-longrope": (
        "Phi3",
        DECODER
        | {
            "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "sliding_window": 9,
            "tie_word_embeddings": True, "pad_token_id": None, "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope", "partial_rotary_factor": 0.75, "attention_factor": 1.2,
                "short_factor": [1.0, 1.0, 1.2, 1.5, 2.0, 2.5], "long_factor": [1.0, 1.5, 2.0, 2.5, 4.0, 5.0],
            },
        },
    ),
    "smollm3": ("SmolLM3", DECODER | {"num_hidden_layers": 4, "tie_word_embeddings": True, "pad_token_id": None}),
    "smollm3-window-biased": (
        "SmolLM3",
        DECODER
        | {
            "hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 7, "attention_bias": True,
            "mlp_bias": True, "no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 8,
            "tie_word_embeddings": False, "pad_token_id": None,
        },
    ),
    "seed-oss": ("SeedOss", DECODER | {"head_dim": 16, "initializer_range": 0.2, "pad_token_id": None}),
    "seed-oss-biased": (
        "SeedOss",
        DECODER
        | {
            "head_dim": 10, "num_key_value_heads": 3, "attention_out_bias": True, "mlp_bias": True,
            "initializer_range": 0.2, "tie_word_embeddings": True, "pad_token_id": None,
        },
    ),
    "ministral3": (
        "Ministral3",
        DECODER
        | {
            "head_dim": 16, "pad_token_id": None,
            "rope_parameters": YARN_ROPE | {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.7},
        },
    ),
    "ministral3-window": (
        "Ministral3",
        DECODER
        | {
            "head_dim": 12, "num_key_value_heads": 3, "sliding_window": 11, "tie_word_embeddings": True,
            "pad_token_id": None,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 900.0, "original_max_position_embeddings": 8,
                "llama_4_scaling_beta": 0.4,
            },
        },
    ),
    "olmo2": ("Olmo2", DECODER | {"pad_token_id": None}),
    "olmo2-biased": (
        "Olmo2",
        DECODER
        | {
            "hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 7, "attention_bias": True,
            "tie_word_embeddings": True, "pad_token_id": None,
        },
    ),
    "olmo3": ("Olmo3", DECODER | {"num_hidden_layers": 4, "sliding_window": 7, "pad_token_id": None}),
    "olmo3-yarn": (
        "Olmo3",
        DECODER
        | {
            "num_key_value_heads": 3, "sliding_window": 9, "attention_bias": True, "pad_token_id": None,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 700.0}, "full_attention": YARN_ROPE,
            },
        },
    ),
    "exaone4": ("Exaone4", DECODER | {"num_hidden_layers": 4, "sliding_window": 6, "head_dim": 16}),
    "exaone4-no-window": (
        "Exaone4",
        DECODER
        | {
            "sliding_window": None, "num_key_value_heads": 1, "layer_types": ["full_attention"] * 3,
            "tie_word_embeddings": True,
        },
    ),
    "granite": (
        "Granite",
        DECODER
        | {
            "embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.25,
            "logits_scaling": 5.0, "rms_norm_eps": 0.01,
        },
    ),
    "granite-biased": (
        "Granite",
        DECODER
        | {
            "hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 7, "attention_bias": True,
            "mlp_bias": True, "tie_word_embeddings": True, "residual_multiplier": 1.7, "logits_scaling": 0.5,
        },
    ),
    "cohere2": (
        "Cohere2",
        DECODER | {"num_hidden_layers": 4, "sliding_window": 7, "logit_scale": 0.3, "pad_token_id": None},
    ),
    "cohere2-biased": (
        "Cohere2",
        DECODER
        | {
            "hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 1, "attention_bias": True,
            "sliding_window": 9, "layer_norm_eps": 0.02, "tie_word_embeddings": False, "pad_token_id": None,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "glm": ("Glm", DECODER | {"head_dim": 8, "pad_token_id": None}),
    "glm-unbiased": (
        "Glm",
        DECODER
        | {
            "head_dim": 16, "num_key_value_heads": 3, "attention_bias": False, "tie_word_embeddings": True,
            "pad_token_id": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.75},
        },
    ),
    "glm4": ("Glm4", DECODER | {"head_dim": 8, "pad_token_id": None}),
    "glm4-unbiased": (
        "Glm4",
        DECODER
        | {
            "head_dim": 12, "num_key_value_heads": 6, "attention_bias": False, "tie_word_embeddings": True,
            "rms_norm_eps": 0.01, "pad_token_id": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 1.0},
        },
    ),
}  # fmt: skip
VARIANTS |= {name: (family, DECODER | changes) for name, (family, changes) in MIXTURES.items()}


def build_model(variant: str, seed: int = 0, **changes: Any) -> transformers.PreTrainedModel:
    """A random model in float32, norms and biases random as well, without end-of-sequence tokens."""
    family, settings = VARIANTS[variant]
    settings = settings | changes
    kind = getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")
    torch.manual_seed(seed)
    model = kind(kind.config_class(**settings, eos_token_id=None, bos_token_id=None)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, 0, 0.2)
        elif parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1, 0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
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
    needs: int = 0
    num_lanes: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_rows(self) -> int:
        return len(self.tables)

    @property
    def num_samples(self) -> int:
        return len(self.sample_index)

    def block_table(self, row: int, num_blocks: int) -> npt.NDArray[np.int32]:
        assert num_blocks <= len(self.tables[row])
        return self.tables[row][:num_blocks]


def native_batch(batch: Batch) -> Any:
    """The same step as the native kernels take it."""
    from asyncengine import _core

    return _core.StepBatch(
        batch.input_ids.tolist(), batch.positions.tolist(), batch.slot_mapping.tolist(),
        batch.query_start.tolist(), batch.context_len.tolist(), [t.tolist() for t in batch.tables],
        batch.sample_index.tolist(),
    )  # fmt: skip


class TinySequence:
    """One sequence of a ``Driver``: its tokens, and how many of them are computed."""

    def __init__(self, prompt: Sequence[int], blocks: list[int]) -> None:
        self.tokens = list(prompt)
        self.prompt_len = len(prompt)
        self.computed = 0
        self.table = np.array(blocks, np.int32)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_len :]


class Driver:
    """Runs a model step by step over randomly scattered blocks: decode rows first, then prefill chunks."""

    def __init__(self, runner: CpuModelRunner, seed: int = 0, *, native: bool = False) -> None:
        """``native`` gives the runner the batches that native kernels need."""
        self.runner = runner
        self.native = native
        self.random = random.Random(seed)
        self.free = list(range(runner.info.num_kv_blocks))
        self.random.shuffle(self.free)
        self.logits: list[torch.Tensor] = []

    def add(self, prompt: Sequence[int], max_len: int) -> TinySequence:
        count = -(-max_len // self.runner.info.block_size)
        return TinySequence(prompt, [self.free.pop() for _ in range(count)])

    def step(self, chunks: list[tuple[TinySequence, int]]) -> None:
        """Compute so many tokens of each sequence, and append the next token to those that are complete."""
        chunks = sorted(chunks, key=lambda c: len(c[0].tokens) - c[0].computed != 1)
        size = self.runner.info.block_size
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, contexts, samples = [0], [], []
        sampled: list[TinySequence] = []
        for sequence, count in chunks:
            span = range(sequence.computed, sequence.computed + count)
            ids += sequence.tokens[span.start : span.stop]
            positions += span
            slots += [int(sequence.table[p // size]) * size + p % size for p in span]
            contexts.append(span.start)
            starts.append(len(ids))
            sequence.computed = span.stop
            if span.stop == len(sequence.tokens):
                samples.append(len(ids) - 1)
                sampled.append(sequence)
        batch = Batch(
            np.array(ids, np.int64), np.array(positions, np.int64), np.array(slots, np.int64),
            np.array(starts, np.int32), np.array(contexts, np.int32), np.array(samples, np.int64),
            [sequence.table for sequence, _ in chunks],
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
