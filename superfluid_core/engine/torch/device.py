"""Where the engine runs and how much memory its KV pool may take: decided once, at start, in words for a person.

Owns device, dtype, threads and pool size. An NVIDIA device that torch cannot use is an error that names the versions,
never a silent fall back to the CPU. What the machine says is read through `Machine`, so that tests can say it instead.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from superfluid_core.engine.torch.cuda.memory import NO_RESERVE, UTILIZATION, Reserve, pool_bytes
from superfluid_core.errors import ConfigError, EngineError
from superfluid_core.modelfiles.config import ModelConfig

HOST_SHARE = 0.25
GIB = 1 << 30
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Machine:
    """What this host and this torch have."""

    def cuda_works(self) -> bool:
        """Whether a kernel really runs, not only whether a device is listed."""
        if not torch.cuda.is_available():
            return False
        try:
            return bool((torch.ones(1, device="cuda") + 1).item() == 2)
        except RuntimeError:
            return False

    def nvidia_driver(self) -> str | None:
        """Version of the driver when an NVIDIA device is present."""
        try:
            text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return "unknown" if Path("/dev/nvidia0").exists() else None
        words = text.split("\n", 1)[0].split()
        return next((word for word in words if word[:1].isdigit() and "." in word), "unknown")

    def torch_versions(self) -> tuple[str, str | None]:
        """(torch, the CUDA that it was built for)."""
        return torch.__version__, torch.version.cuda

    def about(self) -> str:
        """Say in words what torch this is and what driver it stands on."""
        version, cuda = self.torch_versions()
        built = f"built for CUDA {cuda}" if cuda else "built without CUDA"
        driver = self.nvidia_driver()
        seen = f"NVIDIA driver {driver}" if driver else "no NVIDIA driver found"
        return f"{seen}, torch {version} {built}"

    def fast_bf16(self) -> bool:
        """Whether the CPU multiplies bf16 natively."""
        found = any(
            getattr(torch.cpu, name, bool)()
            for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        )
        return bool(found)

    def host_bytes_available(self) -> int:
        """Memory that could be taken without swapping; a control group's limit counts."""
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        for line in _lines("/proc/meminfo"):
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
        limit = "".join(_lines("/sys/fs/cgroup/memory.max")).strip()
        used = "".join(_lines("/sys/fs/cgroup/memory.current")).strip()
        if limit.isdigit() and used.isdigit():
            available = min(available, int(limit) - int(used))
        return max(0, available)

    def cuda_bytes_free(self, device: torch.device) -> int:
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)

    def threads(self) -> int:
        """Physical cores that this process may run on; a control group's quota and torch's own bound count."""
        bounds = [torch.get_num_threads()]
        if hasattr(os, "sched_getaffinity"):
            topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
            cpus = os.sched_getaffinity(0)
            bounds.append(len({"".join(_lines(topology.format(cpu))) or cpu for cpu in cpus}))
        quota = "".join(_lines("/sys/fs/cgroup/cpu.max")).split()
        if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit():
            bounds.append(int(quota[0]) // max(1, int(quota[1])))
        return max(1, min(bounds))


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def choose_device(wanted: str, machine: Machine) -> torch.device:
    """`auto`, `cpu` or `cuda[:n]`. Raises EngineError when a CUDA device is there or asked for and cannot be used."""
    kind = wanted.split(":", 1)[0]
    if kind not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device {wanted[:40]!r} is none of auto, cpu, cuda")
    if kind == "cpu":
        return torch.device("cpu")
    if machine.cuda_works():
        return torch.device("cuda" if kind == "auto" else wanted)
    driver = machine.nvidia_driver()
    if kind == "auto" and driver is None:
        return torch.device("cpu")
    raise EngineError(
        f"torch cannot use this machine's CUDA device: {machine.about()}. "
        "Install a torch that fits the driver, or choose the CPU with --device cpu"
    )


def in_words(device: torch.device, machine: Machine) -> str:
    """Say what a device is, what memory it has, and what this torch stands on."""
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        free = machine.cuda_bytes_free(device)
        what = f"{facts.name}, compute capability {facts.major}.{facts.minor}"
        memory = f"{facts.total_memory / GIB:.1f} GiB, {free / GIB:.1f} GiB free"
        return f"{device}: {what}, {memory}; {machine.about()}"
    available = machine.host_bytes_available() / GIB
    return f"cpu: {machine.threads()} threads, {available:.1f} GiB available; {machine.about()}"


def choose_dtype(
    wanted: str, config: ModelConfig, device: torch.device, machine: Machine
) -> torch.dtype:
    """Choose the dtype of weights and KV. `auto`: the checkpoint's on CUDA, bf16 on a CPU that has it, else float32."""
    if wanted == "auto":
        if device.type == "cuda":
            return DTYPES[config.dtype]
        return torch.bfloat16 if machine.fast_bf16() else torch.float32
    if wanted not in DTYPES:
        raise ConfigError(f"dtype {wanted[:40]!r} is none of auto, {', '.join(DTYPES)}")
    return DTYPES[wanted]


@dataclass(frozen=True, slots=True)
class PoolWish:
    """What was asked for; `tokens_useful` is what all lanes together could ever fill."""

    block_bytes: int
    block_tokens: int
    tokens_useful: int
    blocks: int | None
    memory_bytes: int | None
    reserve: Reserve = NO_RESERVE
    utilization: float = UTILIZATION


def choose_blocks(wish: PoolWish, device: torch.device, machine: Machine) -> int:
    """Blocks of the KV pool: as told, else a share of free memory, on the CPU no more than is useful."""
    if wish.blocks is not None:
        found = wish.blocks
    elif wish.memory_bytes is not None:
        found = wish.memory_bytes // wish.block_bytes
    elif device.type == "cuda":
        free = machine.cuda_bytes_free(device)
        found = pool_bytes(free, wish.reserve, wish.utilization) // wish.block_bytes
    else:
        useful = -(-wish.tokens_useful // wish.block_tokens)
        affordable = int(machine.host_bytes_available() * HOST_SHARE) // wish.block_bytes
        found = min(useful, affordable)
    if found < 1:
        raise ConfigError(
            f"no room for the KV cache: one block of {wish.block_tokens} tokens takes {wish.block_bytes} bytes"
        )
    return found
