"""Digest of the program that computes: KV blocks that one program left on a disk count for no other."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from asyncengine._core import CpuKernels
from asyncengine._core import __file__ as NATIVE_FILE
from asyncengine.version import VERSION

_PACKAGES = ("torch", "triton")


def program_digest(folder: Path | None = None) -> str:
    """A digest of the package's code in ``folder``, of its native module, and of versions and the kind of processor.

    It changes with any file, so that nobody has to remember to raise a version when a kernel or a layout changes. It
    takes some 20 ms. A program without files of its code (a frozen one) goes by its versions.
    """
    folder = folder or Path(__file__).parents[2]  # the native module of an editable install lies elsewhere
    digest = hashlib.sha256(Path(NATIVE_FILE).read_bytes())
    for path in sorted(folder.rglob("*.py")):
        code = path.read_bytes()
        digest.update(repr((path.relative_to(folder).parts, len(code))).encode())
        digest.update(code)
    digest.update(repr([VERSION, *map(_version, _PACKAGES)]).encode())
    digest.update(repr((platform.machine(), CpuKernels.available_isas())).encode())
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
