"""Rotary settings of a config.json."""

from __future__ import annotations

from dataclasses import replace

from asyncengine.errors import ModelError
from asyncengine.models.config import LAYER_TYPES, MAX_POSITIONS, MISSING, RawConfig
from asyncengine.models.files import excerpt
from asyncengine.models.rotary import RopeConfig, longrope_attention_factor, yarn_attention_factor


def read_rope(
    raw: RawConfig, max_positions: int, head_dim: int, *, theta: float = 10_000.0, partial: float | None = None,
    proportional: bool = False,
) -> RopeConfig:  # fmt: skip
    """The rotary settings: rope_theta and rope_scaling or, from transformers 5 on, rope_parameters.

    ``theta`` and ``partial`` are the family's defaults of rope_theta and partial_rotary_factor; without ``partial`` all
    of a head is rotated. ``proportional``: the family may have frequencies of which the last ones are 0.
    """
    scaling = raw.get("rope_scaling", dict, None) or raw.get("rope_parameters", dict, None) or {}
    if any(isinstance(value, dict) for value in scaling.values()):
        raise raw.unsupported("rope_parameters for each layer type")
    rope = RawConfig(scaling, f"{raw.source}, rope scaling")
    kind = rope.get("rope_type", str, None) or rope.get("type", str, "default")
    kinds = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", *(("proportional",) if proportional else ()))
    if kind not in kinds:
        raise raw.unsupported(f"rope scaling {excerpt(kind)}")
    outside = raw.number("partial_rotary_factor", partial or 1.0)
    rotated = rope.number("partial_rotary_factor", outside)
    theta = rope.number("rope_theta", raw.number("rope_theta", theta))
    if kind == "proportional" and rotated <= 1:
        turning = int(rotated * head_dim // 2)
        return RopeConfig(theta=theta, kind=kind, dim=head_dim, factor=rope.number("factor", 1.0), turning=turning)
    if partial is None and (outside, rotated) != (1.0, 1.0):
        raise raw.unsupported("partial_rotary_factor")
    dim = int(head_dim * rotated)
    if rotated > 1 or dim < 2 or dim % 2:
        raise raw.unsupported(f"partial_rotary_factor = {rotated:g} of heads of {head_dim} (head_dim)")
    plain = RopeConfig(theta=theta, kind=kind, dim=dim)
    if kind in ("default", "dynamic"):
        return plain
    original = raw.integer(
        "original_max_position_embeddings", rope.integer("original_max_position_embeddings", max_positions)
    )
    factor = rope.number("factor", max_positions / original if kind in ("yarn", "longrope") else MISSING)
    if kind not in ("llama3", "longrope") and factor * original > MAX_POSITIONS:
        raise ModelError(
            f"{rope.source}: 'factor' times the original positions must be at most {MAX_POSITIONS}, "
            f"found {factor:g} times {original}"
        )
    scaled = replace(plain, factor=factor, original_max_positions=original)
    match kind:
        case "linear":
            return scaled
        case "yarn":
            return _read_yarn(rope, scaled)
        case "longrope":
            return _read_longrope(rope, scaled)
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if not low < high:
        raise ModelError(f"{rope.source}: low_freq_factor {low} must be below high_freq_factor {high}")
    return replace(scaled, low_freq_factor=low, high_freq_factor=high)


def _read_yarn(rope: RawConfig, scaled: RopeConfig) -> RopeConfig:
    # Files also write 0 for a scale that they do not have.
    scales = [rope.number(key) if rope.get(key, (int, float), 0) else None for key in ("mscale", "mscale_all_dim")]
    return replace(
        scaled,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        attention_factor=rope.number("attention_factor", yarn_attention_factor(scaled.factor, *scales)),
    )


def _read_longrope(rope: RawConfig, scaled: RopeConfig) -> RopeConfig:
    if scaled.original_max_positions < 2:
        raise ModelError(f"{rope.source}: 'original_max_position_embeddings' must be at least 2 with longrope")
    factors = []
    for key in ("short_factor", "long_factor"):
        values = rope.get(key, list)
        if len(values) != scaled.dim // 2:
            raise ModelError(f"{rope.source}: {key!r} must have {scaled.dim // 2} numbers, found {len(values)}")
        factors.append(tuple(RawConfig({key: value}, rope.source).number(key) for value in values))
    inferred = longrope_attention_factor(scaled.factor, scaled.original_max_positions)
    return replace(
        scaled,
        short_factor=factors[0],
        long_factor=factors[1],
        attention_factor=rope.number("attention_factor", inferred),
    )


def rope_of_layer_type(raw: RawConfig, kind: str, theta: float) -> RawConfig:
    """Return the config with the rotary settings of the layers of one type as those of all.

    rope_parameters holds them by type; in older files rope_scaling is for "full_attention" alone. ``theta`` is the
    type's default of rope_theta. For ``read_rope``.
    """
    by_type = raw.get("rope_parameters", dict, {})
    if not all(isinstance(by_type.get(key, {}), dict | None) for key in LAYER_TYPES) or set(by_type) - set(LAYER_TYPES):
        raise raw.unsupported("rope_parameters that are not for layer types")
    own = {"rope_theta": theta} | (by_type.get(kind) or {})
    if kind == "full_attention":
        scaling = raw.get("rope_scaling", dict, {})
        if "rope_type" not in scaling and scaling.get("type", "default") != "default":
            # transformers overlooks the old key here, and reads the flag below in no layer type.
            raise raw.unsupported("rope_scaling without rope_type in this family")
        own |= scaling
    RawConfig(own, f"{raw.source}, rope scaling").require("truncate", True)
    return raw.changed({"rope_parameters": own, "rope_scaling": None, "original_max_position_embeddings": None})


def scaled_positions(rope: RopeConfig, max_positions: int) -> int:
    """Positions that a model with this scaling serves, where config.json says ``max_positions``.

    Linear scaling and yarn serve ``factor`` times the original positions: original_max_position_embeddings, or
    max_position_embeddings if that is absent. They serve max_position_embeddings where it is more, since it may state
    the scaled length. With llama3 it always does. Dynamic scaling changes the frequencies of all positions, those in
    the cache included, when a sequence exceeds max_position_embeddings: so it serves no more than these.
    """
    if rope.kind not in ("linear", "yarn"):
        return max_positions
    return max(max_positions, int(rope.factor * rope.original_max_positions))
