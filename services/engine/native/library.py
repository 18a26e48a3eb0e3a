"""The kernels' C interface in Python: structures, checked calls, nothing else.

The library is told addresses; whoever calls keeps the tensors alive, contiguous and of the right size.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from contextlib import suppress
from ctypes import c_float, c_int, c_int32, c_size_t, c_void_p
from functools import cache
from typing import Any

import torch

from services.engine.native.build import Instructions, NoKernels, choose, cpu_flags, library_for

PANEL = 32
"""Outputs of a packed panel; inputs come in steps of as many."""
MAX_HEAD_DIM = 512
HUGE_PAGE = 2 << 20
OnLayer = ctypes.CFUNCTYPE(None, c_int32)


class LayerParts(ctypes.Structure):
    """As in model.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("norm_in", "norm_mid", "qkv_bias", "query_norm", "key_norm")),
        ("window", c_int32),
    ]


class ModelParts(ctypes.Structure):
    """As in model.h."""

    _fields_ = [
        *((n, c_int32) for n in ("layers", "hidden", "heads", "kv_heads", "head_dim", "inner", "vocab", "block_size")),
        ("epsilon", c_float),
        ("scale", c_float),
        *((n, c_void_p) for n in ("embedding", "head", "norm_out", "cosine", "sine", "layer", "memory")),
    ]


class StepParts(ctypes.Structure):
    """As in model.h."""

    _fields_ = [
        *((name, c_int32) for name in ("tokens", "spans", "rows", "pools")),
        *((n, c_void_p) for n in ("ids", "span", "blocks", "wanted", "logits", "finite")),
        ("on_layer", OnLayer),
        *((n, c_void_p) for n in ("pool", "sums")),
    ]


class Kernels:
    """A loaded library. Calls release the interpreter; a handle is used by one thread at a time."""

    def __init__(self, kind: Instructions, path: str) -> None:
        self.kind = kind
        self._library = ctypes.CDLL(path)
        signatures: dict[str, tuple[Any, list[Any]]] = {
            "pdray_begin": (c_int, []),
            "pdray_pack": (None, [c_int, c_void_p, c_int, c_int, c_void_p, c_void_p]),
            "pdray_open": (c_void_p, [c_int, ctypes.POINTER(ModelParts), c_int, c_int]),
            "pdray_close": (None, [c_void_p]),
            "pdray_run": (c_int, [c_void_p, ctypes.POINTER(StepParts)]),
            "pdray_bytes": (c_size_t, [c_void_p]),
            "pdray_attend": (None, [c_int, c_void_p, *[c_int] * 4, c_float, c_int, c_int, *[c_void_p] * 4, c_int]),
            "pdray_attention_bytes": (c_size_t, [c_int] * 5),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments
        if self._library.pdray_begin():
            raise NoKernels("the system does not let this process use AMX tiles")
        self.run: Callable[..., int] = self._library.pdray_run
        self.open: Callable[..., int] = self._library.pdray_open
        self.close: Callable[..., None] = self._library.pdray_close
        self.attend: Callable[..., None] = self._library.pdray_attend
        self.held_bytes: Callable[..., int] = self._library.pdray_bytes
        self.attention_bytes: Callable[..., int] = self._library.pdray_attention_bytes

    def pack(self, weight: torch.Tensor, order: torch.Tensor | None = None) -> torch.Tensor:
        """Panels of a weight [outputs, inputs], rows taken in ``order``; outputs are filled up to whole panels.

        Returns:
            [panels * 32, inputs] of the same type, in the layout of simd.h.
        """
        outputs, inputs = weight.shape
        if inputs % PANEL or weight.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"a weight of {tuple(weight.shape)}, {weight.dtype}, cannot be packed")
        weight = weight.detach().contiguous()
        packed = _roomy(-(-outputs // PANEL) * PANEL, inputs, weight.dtype)
        rows = None if order is None else order.to(torch.int32).contiguous()
        at = rows.data_ptr() if rows is not None else None
        self._library.pdray_pack(weight.itemsize, weight.data_ptr(), outputs, inputs, at, packed.data_ptr())
        return packed


def _roomy(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor, on huge pages where the system gives them: weights are streamed from end to end each step."""
    size = rows * columns * dtype.itemsize
    memory = mmap.mmap(-1, -(-size // HUGE_PAGE) * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=rows * columns).view(rows, columns)


@cache
def load_kernels(name: str = "auto") -> Kernels:
    """The library of that kind, compiled if need be.

    Args:
        name: ``auto``, or a name of `services.engine.native.build.KINDS`.
    Raises:
        NoKernels: they cannot run here; says why.
    """
    kind = choose(name, cpu_flags())
    try:
        return Kernels(kind, str(library_for(kind)))
    except OSError as exc:
        raise NoKernels(f"the compiled kernels do not load: {exc}") from None
