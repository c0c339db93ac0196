"""Checkpoints in the formats of other tools: each weight is packed by the format's own code or after its layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32


class Packing(NamedTuple):
    """A way to pack weights, and the quantization_config of a checkpoint whose layers are packed so."""

    settings: dict[str, Any]
    pack: Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
    """The tensors of a module by their names behind it, and the float32 matrix that they stand for."""


def _grid(weight: Tensor, group: int, bits: int, symmetric: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K] in [0, 2 ** bits), scales and zero points [N, K / G]."""
    parts = weight.view(len(weight), -1, group)
    top = 2**bits - 1
    if symmetric:
        scales = parts.abs().amax(-1) / (2 ** (bits - 1) - 1)
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        scales = (high - low) / top
        zeros = (-low / scales).round()
    scales = scales.half().float()
    codes = ((parts / scales[..., None]).round() + zeros[..., None]).clamp(0, top)
    return codes.flatten(1).int(), scales, zeros.int()


def _matrix(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    group = codes.shape[1] // scales.shape[1]
    return (codes - zeros.repeat_interleave(group, 1)).float() * scales.repeat_interleave(group, 1)


def _words(codes: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """int32 of codes along the last axis; ``places`` of neighbours in a word, the lowest bits first."""
    in_word = 32 // bits
    parts = codes.long().view(*codes.shape[:-1], -1, in_word)
    words = sum(parts[..., i] << (bits * (places[i] if places else i)) for i in range(in_word))
    assert isinstance(words, Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def awq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales, zeros = _grid(weight, GROUP, 4, symmetric=False)
    places = tuple((0, 2, 4, 6, 1, 3, 5, 7).index(i) for i in range(8))  # AutoAWQ: place i holds column order[i]
    tensors = {
        "qweight": _words(codes.T, 4, places), "qzeros": _words(zeros.T, 4, places), "scales": scales.T.half()
    }  # fmt: skip
    return tensors, _matrix(codes, scales, zeros)


def gptq(
    weight: Tensor, bits: int = 4, *, symmetric: bool = True, act_order: bool = False, v2: bool = False
) -> tuple[dict[str, Tensor], Tensor]:
    columns = weight.shape[1]
    order = (
        torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
        if act_order
        else torch.arange(columns)
    )
    codes, scales, zeros = _grid(weight[:, order], GROUP, bits, symmetric)
    inverse = torch.argsort(order)
    stored = codes[:, inverse]
    index = (torch.arange(columns) // GROUP)[inverse]
    tensors = {
        "qweight": _words(stored.T.reshape(-1, 32 // bits, len(weight)).transpose(1, 2), bits)[..., 0],
        "qzeros": _words(zeros.T if v2 else zeros.T - 1, bits), "scales": scales.T.half(), "g_idx": index.int(),
    }  # fmt: skip
    return tensors, _matrix(codes, scales, zeros)[:, inverse]


def compressed(format: str, **weights: Any) -> Packing:
    """By the compressor of compressed-tensors and its own decompression."""
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    settings = {
        "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp\\.gate$"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": args.model_dump(mode="json")}},
    }  # fmt: skip
    compressor = BaseCompressor.get_value_from_registry(format)

    def pack(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        state = {"weight": weight, **_scales(weight, args)}
        made = compressor.compress(dict(state), scheme)
        back = compressor.decompress(dict(made), scheme)["weight"]
        if format == "nvfp4-pack-quantized":  # whose own matrix is rounded to bfloat16
            numbers = unpack_fp4_from_uint8(made["weight_packed"], *weight.shape, dtype=torch.float32)
            scales = made["weight_scale"].float() / made["weight_global_scale"]
            back = numbers * scales.repeat_interleave(16, 1)
        return dict(made), back.float()

    return Packing(settings, pack)


def _scales(weight: Tensor, args: QuantizationArgs) -> dict[str, Tensor]:
    rows, columns = weight.shape
    if args.strategy == "block":
        parts = weight.view(rows // 32, 32, columns // 32, 32).transpose(1, 2).flatten(2)
    else:
        sizes = {"tensor": (1, 1, -1), "channel": (rows, 1, -1)}
        parts = weight.view(sizes.get(str(args.strategy), (rows, columns // (args.group_size or 1), -1)))
    top = {4: 7.0, 8: 127.0}[args.num_bits] if args.type == "int" else {4: 6.0, 8: 448.0}[args.num_bits]
    scales = parts.abs().amax(-1) / top
    state = {"weight_scale": scales.flatten() if args.strategy == "tensor" else scales}
    if args.strategy == "tensor_group":
        state["weight_global_scale"] = (448.0 * 6.0 / weight.abs().max()).reshape(1)
        state["weight_scale"] = (scales * state["weight_global_scale"]).to(torch.float8_e4m3fn).float()
    elif args.type == "float" and args.num_bits == 4:
        state["weight_scale"] = torch.exp2(torch.log2(scales).ceil())
    if not args.symmetric:
        low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        levels = 2**args.num_bits - 1
        state["weight_scale"] = (high - low) / levels
        state["weight_zero_point"] = (-low / state["weight_scale"] - 2 ** (args.num_bits - 1)).round().to(torch.int8)
    return state


def fp8_blocks(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Blocks of [48, 32], which go beyond the rows of some weights."""
    rows, columns = weight.shape
    high, wide = 48, 32
    padded = torch.zeros(-(-rows // high) * high, columns)
    padded[:rows] = weight
    parts = padded.view(-1, high, columns // wide, wide)
    scales = parts.abs().amax((1, 3)) / 448.0 + 1e-9
    values = (parts / scales[:, None, :, None]).view_as(padded)[:rows].to(torch.float8_e4m3fn)
    by_row = scales.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)
    return {"weight": values, "weight_scale_inv": scales}, values.float() * by_row


def _nf4() -> Tensor:
    normal = torch.distributions.Normal(0.0, 1.0)
    positive = normal.icdf(torch.linspace(0.9677, 0.5, 9)[:-1])
    negative = -normal.icdf(torch.linspace(0.9677, 0.5, 8)[:-1])
    table = torch.cat((negative, torch.zeros(1), positive)).sort().values
    return table / table.abs().max()


def nf4(weight: Tensor, nested: bool) -> tuple[dict[str, Tensor], Tensor]:
    parts, table = weight.reshape(-1, 64), _nf4()
    absmax = parts.abs().amax(1)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
    tensors: dict[str, Tensor] = {"weight.absmax": absmax}
    if nested:
        offset, codes = absmax.mean(), torch.linspace(-1, 1, 256)
        left = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256)).view(-1, 256)
        factors = left.abs().amax(1)
        index = (left / factors[:, None] - codes[:, None, None]).abs().argmin(0).flatten()[: len(absmax)]
        absmax = codes[index] * factors.repeat_interleave(256)[: len(absmax)] + offset
        tensors = {
            "weight.absmax": index.to(torch.uint8), "weight.nested_absmax": factors, "weight.nested_quant_map": codes
        }  # fmt: skip
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset.item()}
    index = (parts / absmax[:, None] - table[:, None, None]).abs().argmin(0)
    flat = index.flatten()
    tensors |= {
        "weight": ((flat[::2] << 4) | flat[1::2]).to(torch.uint8)[:, None], "weight.quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }  # fmt: skip
    return tensors, (table[index] * absmax[:, None]).view_as(weight)


def bnb_int8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    top = weight.abs().amax(1)
    codes = (weight / top[:, None] * 127).round().to(torch.int8)
    tensors = {"weight": codes, "SCB": top, "weight_format": torch.zeros((), dtype=torch.uint8)}
    return tensors, codes.float() * top[:, None] / 127


_GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
_BNB: dict[str, Any] = {"quant_method": "bitsandbytes", "llm_int8_skip_modules": ["lm_head", "gate"]}

PACKINGS: dict[str, Packing] = {
    "awq": Packing({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq),
    "gptq": Packing(_GPTQ, gptq),
    "gptq act-order": Packing(
        _GPTQ | {"desc_act": True, "sym": False}, lambda w: gptq(w, symmetric=False, act_order=True)
    ),
    "gptq 8 bits v2": Packing(
        _GPTQ | {"bits": 8, "sym": False, "checkpoint_format": "gptq_v2"},
        lambda w: gptq(w, 8, symmetric=False, v2=True),
    ),
    "packed int4": compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP),
    "packed int4 with zero points": compressed(
        "pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=False
    ),
    "packed int8": compressed("pack-quantized", num_bits=8, type="int", strategy="channel"),
    "int8": compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
    "float8 by tensor": compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
    "float8 by channel": compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "float8 by block": compressed(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[32, 32]
    ),
    "nvfp4": compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
    "mxfp4": compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
    "fp8": Packing(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [48, 32]}, fp8_blocks
    ),
    "nf4": Packing(_BNB | {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, lambda w: nf4(w, nested=False)),
    "nf4 nested": Packing(_BNB | {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, lambda w: nf4(w, nested=True)),
    "bitsandbytes int8": Packing(_BNB | {"load_in_8bit": True}, bnb_int8),
}  # fmt: skip


def is_packed(name: str) -> bool:
    """Return whether a tensor of a dense checkpoint is the weight of a layer that tools quantise."""
    return name.endswith("_proj.weight")


def quantise(source: Path, packed: Path, dense: Path, packing: Packing) -> None:
    """Write a dense checkpoint twice: packed, and with the matrices that its packed weights stand for."""
    config = json.loads((source / "config.json").read_text())
    tensors, floats = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        tensors[name] = floats[name] = tensor
        if is_packed(name):
            made, floats[name] = packing.pack(tensor.float())
            del tensors[name]
            tensors |= {f"{name.removesuffix('.weight')}.{key}": value.contiguous() for key, value in made.items()}
    for path, content, changes in (
        (packed, tensors, {"quantization_config": packing.settings}),
        (dense, floats, {"dtype": "float32"}),
    ):
        path.mkdir(exist_ok=True)
        save_file(content, path / "model.safetensors", {"format": "pt"})
        (path / "config.json").write_text(json.dumps(config | changes))
