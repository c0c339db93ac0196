"""The first place in a model's code where the host waits for the device, or branches on what the device computed.

Such a step cannot be captured. The place is found while the model runs, on any device: each operation is looked at.
"""
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_WAITING = {
    "_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "equal",
    "is_nonzero",
}  # fmt: skip
"""Operations whose result, or its shape, the host asks for."""
_TO_HOST = (Tensor.tolist, Tensor.cpu, Tensor.numpy)
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


class _Operations(TorchDispatchMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name == "index" and any(isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1])
        by_counts = name == "repeat_interleave" and "Tensor" in str(func)
        if name in _WAITING or by_mask or by_counts or _crosses(name, args, kwargs or {}):
            self._found.append(_place())
        return func(*args, **(kwargs or {}))


def _crosses(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation copies from the host's memory to a device, or back. No pageable copy is captured."""
    if name == "_to_copy":
        target = kwargs.get("device")
    elif name == "copy_":
        args, target = (args[1],), args[0].device
    else:
        return False
    return target is not None and (args[0].device.type == "cpu") != (torch.device(target).type == "cpu")


class _Calls(TorchFunctionMode):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _TO_HOST:
            self._found.append(_place())
        return func(*args, **(kwargs or {}))


def _place() -> str:
    """File, line and function of the innermost code that is no library's."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_LIBRARIES):
            return f"{Path(frame.filename).name}:{frame.lineno}, in {frame.name}"
    return "unknown"


def first_wait(run: Callable[[], object]) -> str:
    """The first place at which ``run`` waits; empty if it waits nowhere."""
    found: list[str] = []
    with _Operations(found), _Calls(found):
        run()
    return found[0] if found else ""
