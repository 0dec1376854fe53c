"""The attention backends that this build has, under their names.

`padded` needs nothing but torch. Those that need more are imported when they are made; whether they can be is told by choose.py.
The engine builds whatever name it is given and knows no class.
"""

from __future__ import annotations

from collections.abc import Callable

from superfluid_core.engine.torch.attention.base import AttentionBackend, AttentionShape
from superfluid_core.engine.torch.attention.layered import LayeredAttention
from superfluid_core.engine.torch.attention.padded import PaddedAttention
from superfluid_core.engine.torch.attention.reference import ReferenceAttention
from superfluid_core.engine.torch.kvcache import KvPool
from superfluid_core.errors import ConfigError

MakeBackend = Callable[[KvPool, AttentionShape], AttentionBackend]
DEFAULT = "padded"


def _triton(pool: KvPool, shape: AttentionShape) -> AttentionBackend:
    from superfluid_core.engine.torch.attention.paged import PagedAttention

    return PagedAttention(pool, shape)


def _varlen(pool: KvPool, shape: AttentionShape) -> AttentionBackend:
    from superfluid_core.engine.torch.attention.varlen import VarlenAttention, activate

    activate(pool.device)
    return VarlenAttention(pool, shape)


def _flashinfer(pool: KvPool, shape: AttentionShape) -> AttentionBackend:
    from superfluid_core.engine.torch.attention.flashinfer import FlashInferAttention

    return FlashInferAttention(pool, shape)


BACKENDS: dict[str, MakeBackend] = {
    "padded": PaddedAttention,
    "reference": ReferenceAttention,
    "triton": _triton,
    "varlen": _varlen,
    "flashinfer": _flashinfer,
}


def register(name: str, make: MakeBackend) -> None:
    """Make a backend known under `name`."""
    BACKENDS[name] = make


def is_padded(backend: AttentionBackend) -> bool:
    """Whether a backend reads blocks to their end, also where nothing was written: those want cleared ones."""
    parts = backend.parts if isinstance(backend, LayeredAttention) else (backend,)
    return any(isinstance(part, PaddedAttention) for part in parts)


def make_attention(name: str, pool: KvPool, shape: AttentionShape) -> AttentionBackend:
    """Build the backend called `name`. Raises ConfigError when there is none."""
    make = BACKENDS.get(name)
    if make is None:
        raise ConfigError(f"no attention backend {name!r}; known: {', '.join(sorted(BACKENDS))}")
    if not shape.full_layers:
        return make(pool, shape)
    full, windowed = (make(pool, shape.uniform(is_full=is_full)) for is_full in (True, False))
    return LayeredAttention(full, windowed, shape.full_layers)
