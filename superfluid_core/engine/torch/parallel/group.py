"""The ranks of one engine, and the few things that they do together, each with a deadline.

Owns the process groups. Numbers are added on the devices' own backend (NCCL, gloo on a CPU); words between ranks go as byte tensors over gloo, on
loopback, never pickled. A rank without work waits for a key of the store, which may take for ever, so it looks after its parent between waits; once a
word is announced, everything that follows it has a deadline, and a missed one is a RuntimeError and the end of the process.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from superfluid_core.limits import MIB

dist: Any = torch.distributed  # its groups and stores are C++, of which the hints know half
COLLECTIVE_SECONDS = 60.0
JOIN_SECONDS = 300.0
BUILD_SECONDS = (
    1_800.0  # that one rank may take longer than another to read weights and compile kernels
)
LOOK_SECONDS = 5.0
WORD_BYTES_MAX = 256 * MIB
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank of how many; `port` is the store's, on loopback."""

    rank: int
    world: int
    port: int


def open_store(world: int) -> tuple[Any, int]:
    """Make rank 0's store, and say at which port of loopback the others find it."""
    with socket.socket() as listening:
        listening.bind((HOST, 0))
        listening.listen(world)
        port = int(listening.getsockname()[1])
        store = dist.TCPStore(
            HOST,
            port,
            world,
            is_master=True,
            timeout=timedelta(seconds=JOIN_SECONDS),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
    return store, port


def find_store(place: Place) -> Any:
    """Reach rank 0's store. Raises RuntimeError when nobody is there."""
    deadline = timedelta(seconds=JOIN_SECONDS)
    return dist.TCPStore(HOST, place.port, place.world, is_master=False, timeout=deadline)


class Ranks:
    """One rank's view of them all. Every method is called by all ranks, in the same order."""

    def __init__(self, place: Place, device: torch.device, store: Any) -> None:
        """Meet the others. Raises RuntimeError when they do not come in time."""
        self.rank, self.world, self.device = place.rank, place.world, device
        self._store = store
        store.set(f"here {place.rank}", b"1")
        everyone = [f"here {rank}" for rank in range(place.world)]
        store.wait(everyone, timedelta(seconds=JOIN_SECONDS))
        self._words = _gloo(place, dist.PrefixStore("words", store))
        self._numbers: Any = self._words
        if device.type == "cuda":
            torch.cuda.set_device(device)
            self._numbers = _nccl(place, dist.PrefixStore("numbers", store))
        self._announced = 0

    def add(self, numbers: Tensor) -> Tensor:
        """Add up what all ranks have, in place."""
        how = dist.AllreduceOptions()
        how.timeout = _deadline()
        self._numbers.allreduce([numbers], how).wait()
        return numbers

    def least(self, number: int, seconds: float = COLLECTIVE_SECONDS) -> int:
        """Find the smallest number that any rank has; the others are waited for so long."""
        found = torch.tensor([number])
        how = dist.AllreduceOptions()
        how.reduceOp = dist.ReduceOp.MIN
        how.timeout = timedelta(seconds=seconds)
        self._words.allreduce([found], how).wait()
        return int(found)

    def say(self, word: bytes) -> None:
        """Tell every rank a word, from rank 0."""
        assert self.rank == 0, "rank 0 speaks"
        assert 0 < len(word) <= WORD_BYTES_MAX, "no word, or one beyond the bound"
        self._announced += 1
        self._store.set(f"word {self._announced}", b"1")
        self._store.delete_key(f"word {self._announced - 2}")
        self._tell(torch.tensor([len(word)]))
        self._tell(torch.frombuffer(bytearray(word), dtype=torch.uint8))

    def hear(self, is_wanted: Callable[[], bool]) -> bytes | None:
        """Wait for rank 0's next word; None when `is_wanted`, asked every few seconds, says that nobody wants this rank."""
        self._announced += 1
        while not self._has(f"word {self._announced}"):
            if not is_wanted():
                return None
        count = int(self._tell(torch.zeros(1, dtype=torch.int64)))
        if not 0 < count <= WORD_BYTES_MAX:
            raise RuntimeError(f"a word of {count} bytes")
        return self._tell(torch.empty(count, dtype=torch.uint8)).numpy().tobytes()

    def agree(self, *, flag: bool) -> bool:
        """Take rank 0's flag."""
        return bool(self._tell(torch.tensor([flag], dtype=torch.uint8)))

    def _tell(self, numbers: Tensor) -> Tensor:
        """Make everybody's `numbers` rank 0's."""
        how = dist.BroadcastOptions()
        how.rootRank, how.rootTensor = 0, 0
        how.timeout = _deadline()
        self._words.broadcast([numbers], how).wait()
        return numbers

    def _has(self, key: str) -> bool:
        try:
            self._store.wait([key], timedelta(seconds=LOOK_SECONDS))
        except dist.DistStoreError:
            return False
        return True


def _deadline() -> timedelta:
    return timedelta(seconds=COLLECTIVE_SECONDS)


def _gloo(place: Place, store: Any) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
    options._timeout = _deadline()
    return dist.ProcessGroupGloo(store, place.rank, place.world, options)


def _nccl(place: Place, store: Any) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _deadline()
    return dist.ProcessGroupNCCL(store, place.rank, place.world, options)
