"""Calls into the compiled library, with tensors where C has addresses.

Owns the argument types and the trial that a library must pass before it is used. Sizes are checked here once per model (`fits`),
not in every call: the calls are made hundreds of times a step. All calls release the interpreter's lock.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_float, c_int, c_int64, c_void_p
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everyone knows it by
from torch import Tensor

from superfluid_core.clock import Clock
from superfluid_core.engine.torch.native.build import NoNativeError, library
from superfluid_core.engine.torch.native.structs import (
    Attend,
    Heads,
    Large,
    Many,
    Matrix,
    Model,
    Rows,
    Step,
    Turn,
    address,
)
from superfluid_core.modelfiles.config import ModelConfig

VERSION = 2
LANES_OF_VECTOR = 16
HEAD_DIM_MAX = 256
GROUP_MAX = 16
_CALLS: dict[str, tuple[object, ...]] = {
    "superfluid_add_norm": (
        *(c_int, c_void_p, c_void_p, c_void_p, c_void_p),
        *(c_int, c_int, c_float, c_int),
    ),
    "superfluid_silu": (c_int, c_void_p, c_void_p, c_int, c_int, c_int),
    "superfluid_turn": (c_int, POINTER(Turn), POINTER(Heads)),
    "superfluid_attend": (c_int, POINTER(Attend), POINTER(Heads)),
    "superfluid_quantize": (c_void_p, POINTER(Rows), c_int, c_int),
    "superfluid_product": (POINTER(Matrix), POINTER(Rows), c_void_p, c_int),
    "superfluid_step": (POINTER(Model), POINTER(Step), c_int),
    "superfluid_many": (POINTER(Matrix), POINTER(Many)),
    "superfluid_large": (POINTER(Model), POINTER(Large), c_int),
}


class NativeOps:
    """The library's calls.

    `threads` is how many a call may use, `large_room` the bytes that each needs for a large step, `many_block` the rows that lie together in
    a product of many; 0: there are none.
    """

    def __init__(self, path: Path, threads: int) -> None:
        try:
            self._library = ctypes.CDLL(str(path))
            version = self._library.superfluid_ops_version()
            for name, types in _CALLS.items():
                call = getattr(self._library, name)
                call.argtypes, call.restype = types, None
            self._library.superfluid_large_room.restype = c_int64
            self.many_block = int(self._library.superfluid_many_block())
            self.large_room = int(self._library.superfluid_large_room())
        except (OSError, AttributeError) as error:
            raise NoNativeError(f"the built library cannot be loaded: {error}") from None
        if version != VERSION:
            raise NoNativeError(f"the built library is of version {version}, not {VERSION}")
        self.threads = threads
        self._add_norm = self._library.superfluid_add_norm
        self._silu = self._library.superfluid_silu
        self._turn = self._library.superfluid_turn
        self._attend = self._library.superfluid_attend

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add `delta` to x [rows, width] in place and return its RMS norm, times `weight`."""
        out = torch.empty_like(x)
        rows, width = x.shape
        more = None if delta is None else delta.data_ptr()
        self._add_norm(
            x.dtype is torch.float32, x.data_ptr(), more, weight.data_ptr(), out.data_ptr(),
            rows, width, eps, self.threads,
        )  # fmt: skip
        return out

    def silu_times(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up, where rows are gate, then up."""
        rows, width = gate_up.shape
        out = gate_up.new_empty((rows, width // 2))
        self._silu(
            gate_up.dtype is torch.float32, gate_up.data_ptr(), out.data_ptr(),
            rows, width // 2, self.threads,
        )  # fmt: skip
        return out

    def turn(self, is_float: bool, turn: Turn, heads: Heads) -> None:  # noqa: FBT001 - as C has it
        self._turn(is_float, byref(turn), byref(heads))

    def attend(self, is_float: bool, attend: Attend, heads: Heads) -> None:  # noqa: FBT001 - as C has it
        self._attend(is_float, byref(attend), byref(heads))

    def quantize(self, x: Tensor, rows: Rows) -> None:
        """Cut float32 rows into int8 groups."""
        self._library.superfluid_quantize(x.data_ptr(), byref(rows), x.shape[0], x.shape[1])

    def product(self, matrix: Matrix, rows: Rows, count: int) -> Tensor:
        """Quantized rows times a quantized matrix, by one thread."""
        out = torch.empty((count, matrix.outputs))
        self._library.superfluid_product(byref(matrix), byref(rows), out.data_ptr(), count)
        return out

    def many(self, matrix: Matrix, many: Many) -> None:
        self._library.superfluid_many(byref(matrix), byref(many))

    def step(self, model: Model, step: Step, phases: int) -> None:
        self._library.superfluid_step(byref(model), byref(step), phases)

    def large_step(self, model: Model, step: Large, phases: int) -> None:
        self._library.superfluid_large(byref(model), byref(step), phases)


def heads_of(config: ModelConfig, block_tokens: int) -> Heads:
    """Describe a model's heads to C."""
    return Heads(
        config.heads,
        config.kv_heads,
        config.head_dim,
        block_tokens,
        config.sliding_window or 0,
        config.norm_eps,
    )


def fits(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether a model's sizes are those that the sources were written for."""
    widths = (config.hidden, config.intermediate, config.head_dim)
    return (
        dtype in (torch.float32, torch.bfloat16)
        and all(width % LANES_OF_VECTOR == 0 for width in widths)
        and config.head_dim <= HEAD_DIM_MAX
        and config.heads % config.kv_heads == 0
        and config.heads // config.kv_heads <= GROUP_MAX
    )


def load_native(cache: Path, threads: int, clock: Clock) -> NativeOps:
    """Build if need be, load, try. Raises NoNativeError with the reason."""
    ops = NativeOps(library(cache, clock), threads)
    with torch.inference_mode():
        is_right = _trial(ops)
    if not is_right:
        raise NoNativeError("the built library computes something else than torch")
    return ops


def _trial(ops: NativeOps) -> bool:
    """Compare what takes no set-up with torch."""
    generator = torch.Generator().manual_seed(0)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        x, delta, weight = torch.randn(3, 3, 64, generator=generator).to(dtype)
        summed = x + delta
        wanted = F.rms_norm(summed, (64,), weight[0], 1e-5)
        found = ops.add_norm(x, delta, weight[0], 1e-5)
        gate_up = torch.randn(3, 64, generator=generator).to(dtype)
        gate, up = gate_up.chunk(2, dim=-1)
        pairs = ((found, wanted), (x, summed), (ops.silu_times(gate_up), F.silu(gate) * up))
        if not all(torch.allclose(a.float(), b.float(), atol=bound, rtol=bound) for a, b in pairs):
            return False
    return True


__all__ = ["NativeOps", "address", "fits", "heads_of", "load_native"]
