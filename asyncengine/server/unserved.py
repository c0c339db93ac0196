"""Fields of requests, of whatever engine, that would change the output and are not served here.

Each stands with the values that ask for nothing; with any other value it is answered with 400 that names it. A field
that has a twin here is served in place of standing in these tables (``protocol.TWINS``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

logger = logging.getLogger("asyncengine.server")

Fields = Mapping[str, tuple[object, ...]]

NOTHING: tuple[object, ...] = (None, False, 0, "", [], {})
_ABSENT: tuple[object, ...] = (None,)

_SAMPLERS: Fields = {
    "length_penalty": (None, 1),
    "typical_p": (None, 1),
    "typ_p": (None, 1),
    "top_a": (None, 0),
    "top_n_sigma": (None, 0, -1),
    "tfs": (None, 1),
    "tfs_z": (None, 1),
    "mirostat": (None, 0),
    "mirostat_mode": (None, 0),
    "dry_multiplier": (None, 0),
    "xtc_probability": (None, 0),
    "epsilon_cutoff": (None, 0),
    "eta_cutoff": (None, 0),
    "smoothing_factor": (None, 0),
    "dynatemp_range": (None, 0),
    "dynamic_temperature": (None, False),
    "adaptive_target": (None, 0, -1),
    "repeat_penalty": (None, 1),
    "penalty_alpha": (None, 0),
    "guidance_scale": (None, 1),
    "negative_prompt": (None, ""),
    "watermark": (None, False),
    "samplers": NOTHING,
    "logits_processors": NOTHING,
    "custom_logit_processor": NOTHING,
    "custom_params": NOTHING,
    "vllm_xargs": NOTHING,
    "use_beam_search": (None, False),
    "num_beams": (None, 1),
    "beam_width": (None, 1),
}
_LENGTHS: Fields = {
    "max_new_tokens": _ABSENT,
    "min_new_tokens": (None, 0),
    "n_predict": (None, -1),
    "n_keep": (None, 0),
    "t_max_predict_ms": (None, 0, -1),
    "thinking_token_budget": _ABSENT,
    "thinking_budget": _ABSENT,
    "reasoning_budget": (None, -1),
    "repetition_detection": NOTHING,
    "stop_regex": NOTHING,
    "no_stop_trim": (None, False),
}
_FORMS: Fields = {
    "guided_whitespace_pattern": _ABSENT,
    "guided_decoding_backend": (None, "auto"),
    "whitespace_pattern": _ABSENT,
    "structural_tag": _ABSENT,
    "grammar_lazy": (None, False),
    "grammar_triggers": NOTHING,
}
_INPUTS: Fields = {
    "prompt_embeds": NOTHING,
    "input_embeds": NOTHING,
    "image_data": NOTHING,
    "audio_data": NOTHING,
    "video_data": NOTHING,
    "multi_modal_data": NOTHING,
    "multimodal_data": NOTHING,
    "mm_processor_kwargs": NOTHING,
    "lora": NOTHING,
    "lora_path": NOTHING,
    "lora_request": NOTHING,
    "adapter_id": NOTHING,
    "session_params": NOTHING,
    "kv_transfer_params": NOTHING,
}
_OUTPUTS: Fields = {
    "return_hidden_states": (None, False),
    "decoder_input_details": (None, False),
    "separate_reasoning": (None, True),
    "stream_reasoning": (None, True),
    "include_reasoning": (None, True),
}

GENERATION: Fields = {**_SAMPLERS, **_LENGTHS, **_FORMS, **_INPUTS, **_OUTPUTS}
"""Unserved fields of all routes that generate."""

COMPLETION: Fields = {
    **GENERATION,
    "add_special_tokens": (None, True),
}
CHAT: Fields = {
    **{name: neutral for name, neutral in GENERATION.items() if name != "include_reasoning"},
    "best_of": (None, 1),
    "suffix": (None, ""),
    "modalities": (None, ["text"]),
    "audio": _ABSENT,
    "web_search_options": _ABSENT,
    "moderation": _ABSENT,
    "add_special_tokens": (None, False),
    "reasoning": NOTHING,
    "thinking": _ABSENT,
    "enable_thinking": _ABSENT,
}
_NO_CHAT_COMPLETION: Fields = {
    "best_of": (None, 1),
    "logprobs": (None, False),
    "echo": (None, False),
    "chat_template": _ABSENT,
    "documents": NOTHING,
}
#: Edits of /v1/messages that leave everything as it is. Claude Code sends the first one.
_NO_EDITS = tuple({"type": "clear_thinking_20251015", "keep": keep} for keep in ("all", {"type": "all"}))
RESPONSES: Fields = {
    **GENERATION,
    **_NO_CHAT_COMPLETION,
    "background": (None, False),
    "conversation": _ABSENT,
    "prompt": _ABSENT,
    "context_management": NOTHING,
    "moderation": _ABSENT,
}
MESSAGES: Fields = {
    **GENERATION,
    **_NO_CHAT_COMPLETION,
    "container": _ABSENT,
    "mcp_servers": NOTHING,
    "compaction": _ABSENT,
    "context_management": (*NOTHING, {"edits": []}, {"edits": None}, *({"edits": [edit]} for edit in _NO_EDITS)),
    "fallbacks": NOTHING,
}
VECTORS: Fields = {
    "max_tokens_per_doc": (None, 4096),  # Cohere's own default
    "messages": (None, []),
    "activation": (None, True),
    "softmax": (None, True),
    "use_activation": (None, True),
    "add_special_tokens": (None, True),
    "prompt_embeds": NOTHING,
    "mm_processor_kwargs": NOTHING,
    "instruction": (None, ""),
    "raw_scores": (None, False),
    "embed_dtype": (None, "float32"),
    "endianness": (None, "native", "little"),
}


_passed_over: set[str] = set()


def pass_over(what: str) -> None:
    """Log that requests have ``what`` and are served without. Each is said once for the life of the process.

    ``what`` is one of a small number of texts of this program, never a text of a client.
    """
    if what not in _passed_over:
        _passed_over.add(what)
        logger.info("%s: asked for, not served here, and left out; this is said once", what)
