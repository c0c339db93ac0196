"""Repairs of Triton's interpreter for the tests."""

from __future__ import annotations

import inspect
import os
from typing import Any

import numpy as np
import torch
import triton.language as tl

from tests.kernels.bounds import watch
from tests.kernels.quick_interpreter import quicken

WIDER = {tl.float16: torch.float16, tl.bfloat16: torch.bfloat16, tl.float32: torch.float32}
WORDS = {tl.float16: torch.int16, tl.bfloat16: torch.int16, tl.float32: torch.int32}


def repair_interpreter() -> None:
    """Does nothing where kernels are compiled; a second call changes nothing."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    if not hasattr(interpreter, "unrepaired"):
        changed = interpreter._convert_float, interpreter._patch_lang_tensor, interpreter._patch_lang
        interpreter.unrepaired = *changed, interpreter.InterpreterBuilder.create_dot, interpreter.ReduceOps.min_max
        quicken(interpreter)
        watch(interpreter)
    convert_float, patch_tensor, patch_language, create_dot, min_max = interpreter.unrepaired
    languages: dict[int, list[Any]] = {}

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        """Rounds float32 to bfloat16 and to float8, where the interpreter cuts it off or forgets to carry."""
        if (source, target) == (tl.float32, tl.float8e4nv):
            limit = float(torch.finfo(torch.float8_e4m3fn).max)
            exact = torch.from_numpy(np.array(data, dtype=np.float32)).clamp(-limit, limit)
            return exact.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        if source == tl.float8e4nv and target in WIDER:
            stored = torch.from_numpy(np.array(data)).view(torch.float8_e4m3fn)
            return stored.to(WIDER[target]).view(WORDS[target]).numpy().view(f"u{target.primitive_bitwidth // 8}")
        if (source, target) == (tl.bfloat16, tl.float32):
            return data.astype(np.uint32) << 16
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert_float(data, source, target, rounding)
        bits = np.ascontiguousarray(data).view(np.uint32)
        even = bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))
        return (np.where(np.isnan(data), bits | np.uint32(0x400000), even) >> 16).astype(np.uint16)

    def patch(tensor: Any, scope: Any) -> None:
        """Scalars, arrays of one element here, can be loop bounds; numpy 2.4 refuses to convert them."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def patch_once(function: Any) -> Any:
        """Patch once: each call of a device function would look at every name of the language again, half of all the
        time."""
        if (named := id(function.__globals__)) not in languages:
            modules = [m for m in function.__globals__.values() if inspect.ismodule(m)]
            languages[named] = [m for m in modules if m in (tl, tl.core)]
        if languages[named] and not any(tl.core.is_builtin(language.load) for language in languages[named]):
            return interpreter._LangPatchScope()
        return patch_language(function)

    def dot(builder: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        """A BLAS may add up a row in another order at another place of the matrix; tensor cores do not."""
        if a.data.dtype != np.float32:
            return create_dot(builder, a, b, d, *rest)
        return interpreter.TensorHandle(np.einsum("...ik,...kj->...ij", a.data, b.data) + d.data, d.dtype.scalar)

    quiet = {np.nanmax: np.fmax.reduce, np.nanmin: np.fmin.reduce}

    def reduce_quietly(reduction: Any, values: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        """Rows that a step does not use hold whatever memory held, and numpy warns where that is NaN throughout."""
        return min_max(reduction, values, quiet.get(val_reduce_op, val_reduce_op), idx_reduce_op)

    interpreter._convert_float, interpreter._patch_lang_tensor, interpreter._patch_lang = convert, patch, patch_once
    interpreter.InterpreterBuilder.create_dot = dot
    interpreter.ReduceOps.min_max = reduce_quietly
