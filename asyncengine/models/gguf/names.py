"""Names of tensors in GGUF files for those of transformers."""

from __future__ import annotations

import re
from typing import NamedTuple

_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}  # fmt: skip
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
_EXPERT = {
    "gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps", "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps", "w2": "ffn_down_exps",
}  # fmt: skip
_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_OF_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")


class Stored(NamedTuple):
    """A tensor, or one matrix of it."""

    name: str
    expert: int | None = None
    """Index of the matrix in a tensor that holds those of all experts."""


def stored_name(name: str, architecture: str) -> Stored | None:
    """The place of a tensor that a family calls ``name``; None if no file has one of that kind."""
    module, _, kind = name.rpartition(".")
    if module in _OUTER:
        return Stored(f"{_OUTER[module]}.{kind}")
    if (match := _IN_LAYER.fullmatch(module)) is None:
        return None
    layer, block = match.groups()
    if expert := _OF_EXPERT.fullmatch(block):
        known = _EXPERT.get(expert[2])
        return None if known is None else Stored(f"blk.{layer}.{known}.{kind}", int(expert[1]))
    names = _LAYER | _GEMMA if architecture.startswith("gemma") else _LAYER
    return Stored(f"blk.{layer}.{names[block]}.{kind}") if block in names else None
