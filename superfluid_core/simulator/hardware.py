"""Published figures of accelerators and models, and what bytes and operations take on them.

Integers only: bytes, operations, nanoseconds. A rate is per second. Nothing here is measured; `measured(FILE)` in costs.py is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from superfluid_core.errors import ConfigError

SECOND_NS = 1_000_000_000
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Gpu:
    """Peak rates of one device: bytes and operations a second; `host` is its link to host memory."""

    name: str
    memory_bytes: int
    bandwidth: int
    flops: int
    host: int


@dataclass(frozen=True, slots=True)
class Model:
    """Size of one model: `bits_x10` is ten times the bits of a weight (4.5 bits are 45)."""

    name: str
    parameters: int
    bits_x10: int
    kv_bytes: int

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.bits_x10 // 80

    @property
    def flops(self) -> int:
        """Operations of one token: a multiplication and an addition per parameter."""
        return 2 * self.parameters


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("rtx4090", 24 * 10**9, 1_008 * 10**9, 1_652 * 10**11, 315 * 10**8),
        Gpu("h100", 80 * 10**9, 3_350 * 10**9, 989 * 10**12, 63 * 10**9),
        Gpu("h200", 141 * 10**9, 4_800 * 10**9, 989 * 10**12, 63 * 10**9),
    )
}
MODELS = {
    model.name: model
    for model in (
        Model("8b", 8_030_000_000, 160, 131_072),
        Model("8b-q4", 8_030_000_000, 45, 131_072),
        Model("70b", 70_550_000_000, 160, 327_680),
        Model("135m", 134_515_008, 160, 23_040),
    )
}


def find_gpu(name: str) -> Gpu:
    return _find(GPUS, name, "accelerator")


def find_model(name: str) -> Model:
    return _find(MODELS, name, "model")


def _find(table: dict[str, _T], name: str, kind: str) -> _T:
    found = table.get(name)
    if found is None:
        raise ConfigError(f"unknown {kind} {name[:40]!r}; known: {', '.join(table)}")
    return found


def transfer_ns(size: int, rate: int) -> int:
    """Time to move `size` bytes at `rate` bytes a second."""
    return -(-size * SECOND_NS // rate)


def compute_ns(operations: int, rate: int) -> int:
    """Time of `operations` at `rate` operations a second."""
    return -(-operations * SECOND_NS // rate)
