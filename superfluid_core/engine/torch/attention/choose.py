"""Which attention backend runs where: the first of an order that is installed, fits, and proves itself in a trial.

Owns the order, the probes and the trial. Whether a library's kernel works on a device is not to be read from version numbers: each
candidate computes a small ragged step of the model's own shape beside the reference, and one that raises or differs is passed over
with its reason. A backend that was asked for by name and fails is an error, never silently another one.

    cuda    flashinfer, varlen, triton, padded
    cpu     what the registry marks as its default
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace

import torch

from superfluid_core.engine.compose import StepRow
from superfluid_core.engine.torch.attention.base import AttentionBackend, Site
from superfluid_core.engine.torch.attention.reference import ReferenceAttention
from superfluid_core.engine.torch.attention.registry import DEFAULT, make_attention
from superfluid_core.engine.torch.attention.varlen import restore
from superfluid_core.engine.torch.batch import Batch, BlockTables, compose_batch
from superfluid_core.engine.torch.kvcache import KvPool, KvShape
from superfluid_core.engine.torch.own_kernels import REASON_CHARS_MAX, reason_of
from superfluid_core.errors import ConfigError, SuperfluidError
from superfluid_core.scheduler.plan import LanePlan

AUTO = "auto"
ORDER_CUDA = ("flashinfer", "varlen", "triton", "padded")
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
TRIAL_BLOCKS = 16
FLASHINFER_HEADS = (64, 128, 256)

OnPassed = Callable[[str, str], None]


def choose_attention(wanted: str, site: Site, on_passed: OnPassed | None = None) -> str:
    """Name the backend for a site. `on_passed` hears of each better one that does not work, and why.

    Raises ConfigError when the one that was asked for does not.
    """
    if wanted != AUTO:
        reason = unfit(wanted, site)
        if reason is not None:
            raise ConfigError(f"--attention-backend {wanted}: {reason}")
        return wanted
    if site.device.type != "cuda":
        return DEFAULT
    for name in ORDER_CUDA:
        reason = unfit(name, site)
        if reason is None:
            return name
        if name == "varlen":
            restore()
        if on_passed is not None:
            on_passed(name, reason)
    raise ConfigError("no attention backend works on this device")


def unfit(name: str, site: Site) -> str | None:
    """Say why this backend cannot be used here; None when it can."""
    return _missing(name, site) or trial(name, site)


def _missing(name: str, site: Site) -> str | None:
    """Say what can be told without running anything."""
    if name == "varlen" and site.shape.soft_cap > 0:
        return "it knows no soft cap"
    if name == "triton":
        return triton_missing(site.device, site.dtype)
    return _library_missing(name, site) if name in ("flashinfer", "varlen") else None


def triton_missing(device: torch.device, dtype: torch.dtype) -> str | None:
    """Say what our own kernels lack for rows of this dtype there; None when they can be tried."""
    if importlib.util.find_spec("triton") is None:
        return "the triton package is not installed"
    if device.type == "cuda":
        return None
    if not interpreted():
        return "it needs a CUDA device"
    is_narrow = dtype is torch.bfloat16
    return "Triton's interpreter cannot multiply bfloat16" if is_narrow else None


def _library_missing(name: str, site: Site) -> str | None:
    if site.device.type != "cuda":
        return "it needs a CUDA device"
    if site.dtype is torch.float32:
        return "it computes in 16 bits only"
    if name == "varlen":
        found = torch.cuda.get_device_capability(site.device)
        return None if found in ((9, 0), (10, 0)) else "it needs compute capability 9.0 or 10.0"
    if importlib.util.find_spec("flashinfer") is None:
        return "the flashinfer package is not installed"
    # what it has no kernel for it would compile for minutes, and in vain
    is_known = site.shape.head_dim in FLASHINFER_HEADS
    return None if is_known else f"it has no kernels for heads of {site.shape.head_dim} numbers"


def interpreted() -> bool:
    """Whether Triton runs kernels as Python, on any device: for tests and self-tests."""
    if importlib.util.find_spec("triton") is None:
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


def trial(name: str, site: Site) -> str | None:
    """Compute one ragged step beside the reference; None when they agree."""
    try:
        with torch.inference_mode():
            off = _difference(name, site)
    except SuperfluidError as error:
        return error.message[:REASON_CHARS_MAX]
    except Exception as error:  # noqa: BLE001 - libraries call compilers, and fail in any way that these do
        return reason_of(error)
    bound = TOLERANCES[site.dtype]
    return None if off <= bound else f"it is off by {off:.2g} in a trial, {bound:g} is allowed"


def trial_batch(site: Site) -> Batch:
    """Make two decoding rows and two chunks, one of them with a past, over scattered blocks."""
    size = site.block_tokens
    lanes = [
        LanePlan(0, True, size + 2, (1,), 1, 0, (5, 9)),
        LanePlan(1, True, 3, (1,), 1, 0, (2,)),
        LanePlan(2, False, 2, (1,) * (size + 1), 1, 0, (7, 3)),
        LanePlan(3, False, 0, (1,) * 5, 1, 0, (11, 13)),
    ]
    rows = [StepRow(p.lane, p.computed, p.inputs, True, 0, p.decoding) for p in lanes]
    return compose_batch(rows, BlockTables(lanes, size), site.device)


def trial_pool(site: Site) -> KvPool:
    """Make a small pool that holds noise: what lies beyond a context must not matter."""
    shape = site.shape
    sizes = (TRIAL_BLOCKS, site.block_tokens, shape.kv_heads, shape.head_dim)
    pool = KvPool(KvShape(1, *sizes, site.dtype), site.device)
    generator = torch.Generator().manual_seed(1)
    for part in (pool.keys[0], pool.values[0]):
        part.copy_(torch.randn(sizes, generator=generator).to(site.dtype))
    return pool


def _difference(name: str, site: Site) -> float:
    # one layer is tried: where layers differ, one with a window
    site = replace(site, shape=site.shape.uniform(is_full=False))
    shape, batch = site.shape, trial_batch(site)
    generator = torch.Generator().manual_seed(2)
    drawn = [
        torch.randn((batch.tokens, heads, shape.head_dim), generator=generator)
        .to(site.dtype)
        .to(site.device)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    ]
    outs = []
    for make in (lambda pool: make_attention(name, pool, shape), _reference(site)):
        backend: AttentionBackend = make(trial_pool(site))
        backend.plan(batch)
        outs.append(backend.run(0, *drawn).float())
    return float((outs[0] - outs[1]).abs().max())


def _reference(site: Site) -> Callable[[KvPool], AttentionBackend]:
    return lambda pool: ReferenceAttention(pool, site.shape)
