"""How much of a device's memory the KV pool may take: what is free, less what steps and recorded steps will need.

Owns the trial that measures those needs before the pool exists: the widest eager step and two recorded sizes run over a small pool.
The first size recorded pays for the memory that all sizes share, the second shows what each further one adds. A share of what remains is
the pool's (`--gpu-memory-utilization`), the rest is for what nobody foresees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from superfluid_core.limits import MIB

GRAPH_BYTES_MIN = 2 * MIB
UTILIZATION = 0.9


@dataclass(frozen=True, slots=True)
class Reserve:
    """Memory that must stay free of KV: for the widest eager step, and for recorded steps."""

    step_bytes: int = 0
    graphs_bytes: int = 0

    @property
    def bytes(self) -> int:
        return self.step_bytes + self.graphs_bytes


NO_RESERVE = Reserve()


class Meter(Protocol):
    """Reads a device's memory."""

    def used_bytes(self) -> int:
        """Memory that this process holds and nobody else can have."""
        ...

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """Run something; the most that its tensors took at once, beyond what was taken before."""
        ...


class CudaMeter:
    """torch's own account for tensors, the driver's for everything else (graphs, workspaces, modules)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def used_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return int(total - free)

    def peak_bytes(self, run: Callable[[], None]) -> int:
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return max(0, torch.cuda.max_memory_allocated(self._device) - before)


def measure_reserve(
    meter: Meter, step: Callable[[], None], record: Callable[[int], None], sizes: Sequence[int]
) -> Reserve:
    """Run the widest step, then record the largest size and the next; `sizes` ascend, none means that nothing is recorded."""
    step()  # kernels are compiled and workspaces made: they are in use from here on
    step_bytes = meter.peak_bytes(step)
    graphs_bytes = 0
    before = meter.used_bytes()
    for number, size in enumerate(sizes[::-1][:2]):
        record(size)
        after = meter.used_bytes()
        taken = max(after - before, GRAPH_BYTES_MIN)
        graphs_bytes += taken if number == 0 else taken * (len(sizes) - 1)
        before = after
    return Reserve(step_bytes, graphs_bytes)


def pool_bytes(free_bytes: int, reserve: Reserve, utilization: float) -> int:
    """Bytes that the pool may take of what is free now."""
    return max(0, int((free_bytes - reserve.bytes) * utilization))
