"""The attention backends that this build has, under their names.

`padded` is the default everywhere: it needs nothing but torch. A kernel library is added by `register`, guarded by its
own probe; the engine builds whatever name it is given and knows no class.
"""

from __future__ import annotations

from collections.abc import Callable

from superfluid_core.engine.torch.attention.base import AttentionBackend, AttentionShape
from superfluid_core.engine.torch.attention.padded import PaddedAttention
from superfluid_core.engine.torch.attention.reference import ReferenceAttention
from superfluid_core.engine.torch.kvcache import KvPool
from superfluid_core.errors import ConfigError

MakeBackend = Callable[[KvPool, AttentionShape], AttentionBackend]
DEFAULT = "padded"
BACKENDS: dict[str, MakeBackend] = {
    "padded": PaddedAttention,
    "reference": ReferenceAttention,
}


def register(name: str, make: MakeBackend) -> None:
    """Make a backend known under `name`."""
    BACKENDS[name] = make


def make_attention(name: str, pool: KvPool, shape: AttentionShape) -> AttentionBackend:
    """Build the backend called `name`. Raises ConfigError when there is none."""
    make = BACKENDS.get(name)
    if make is None:
        raise ConfigError(f"no attention backend {name!r}; known: {', '.join(sorted(BACKENDS))}")
    return make(pool, shape)
