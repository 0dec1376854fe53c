"""The few things that only a CUDA device does, and what stands in for them elsewhere.

Owns recording a function over fixed tensors and replaying it, reading ids back without stopping the device, and ordering work on a
side stream. A CPU runs everything at once and in order, so there each of these is what it means: a call, a copy, nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

WARM_RUNS = 2

Replay = Callable[[], None]


class Pending(Protocol):
    """Ids on their way to the host."""

    def ids(self) -> list[int]:
        """Wait for them, for as long as the device takes to get there."""
        ...


class Device(Protocol):
    """Where steps run."""

    def record(self, run: Callable[[], None]) -> Replay:
        """Run once and keep what was launched; the result launches it again, reading the same tensors anew."""
        ...

    def fetch(self, ids: Tensor) -> Pending:
        """Send ids to the host, behind the work that makes them. `ids` may be overwritten afterwards."""
        ...

    def upload(self, values: Sequence[int] | Tensor, dtype: torch.dtype) -> Tensor:
        """Bring numbers to the device without waiting for what it does."""
        ...


class _Fetched:
    """Ids that are here."""

    __slots__ = ("_ids",)

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def ids(self) -> list[int]:
        return self._ids


class HostDevice:
    """A CPU, or any device whose every call ends before it returns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def record(self, run: Callable[[], None]) -> Replay:
        run()
        return run

    def fetch(self, ids: Tensor) -> Pending:
        return _Fetched(ids.tolist())

    def upload(self, values: Sequence[int] | Tensor, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(values, dtype=dtype).to(self.device)


class _Fetching:
    """Ids that a stream copies into pinned memory."""

    __slots__ = ("_done", "_host")

    def __init__(self, host: Tensor, done: torch.cuda.Event) -> None:
        self._host = host
        self._done = done

    def ids(self) -> list[int]:
        self._done.synchronize()
        found: list[int] = self._host.tolist()
        return found


class CudaDevice:
    """Graphs over one shared memory pool; pinned buffers come from torch's cache, which knows when a copy is over."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], None]) -> Replay:
        main = torch.cuda.current_stream(self.device)
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # torch has no hints here
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for _ in range(WARM_RUNS):  # kernels are compiled and workspaces made outside the graph
                run()
        main.wait_stream(side)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        # other threads may look at their own events meanwhile, as NCCL's does
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()

        def replay() -> None:
            graph.replay()

        return replay

    def fetch(self, ids: Tensor) -> Pending:
        host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
        host.copy_(ids, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no hints here
        done.record(torch.cuda.current_stream(self.device))
        return _Fetching(host, done)

    def upload(self, values: Sequence[int] | Tensor, dtype: torch.dtype) -> Tensor:
        host = torch.as_tensor(values, dtype=dtype).pin_memory()
        return host.to(self.device, non_blocking=True)


def device_for(device: torch.device) -> Device:
    """Choose what stands for this device."""
    return CudaDevice(device) if device.type == "cuda" else HostDevice(device)


def use_device(device: torch.device) -> None:
    """Let what this thread launches go to `device`: kernels, streams and graphs ask for the thread's own one."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
