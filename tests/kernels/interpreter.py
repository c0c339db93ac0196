"""Two things in which Triton's interpreter is not like the hardware, put right for the tests."""

from __future__ import annotations

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
        interpreter.unrepaired = interpreter._convert_float, interpreter._patch_lang_tensor
    convert_float, patch_tensor = interpreter.unrepaired

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

    interpreter._convert_float, interpreter._patch_lang_tensor = convert, patch
