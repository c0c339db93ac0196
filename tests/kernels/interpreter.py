"""What is wrong with Triton's interpreter, put right for the tests."""

from __future__ import annotations

import inspect
import os
from typing import Any

import numpy as np
import triton.language as tl


def repair_interpreter() -> None:
    """Does nothing where kernels are compiled; a second call changes nothing."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    if not hasattr(interpreter, "unrepaired"):
        interpreter.unrepaired = interpreter._convert_float, interpreter._patch_lang_tensor, interpreter._patch_lang
    convert_float, patch_tensor, patch_language = interpreter.unrepaired

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        """float32 is rounded to bfloat16, where the interpreter cuts it off."""
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
        """Each call of a device function would look at every name of the language again: half of all the time."""
        languages = [m for m in function.__globals__.values() if inspect.ismodule(m) and m in (tl, tl.core)]
        if languages and not any(tl.core.is_builtin(language.load) for language in languages):
            return interpreter._LangPatchScope()
        return patch_language(function)

    interpreter._convert_float, interpreter._patch_lang_tensor, interpreter._patch_lang = convert, patch, patch_once
