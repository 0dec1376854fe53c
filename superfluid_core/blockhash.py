"""Names for KV blocks: a chain hash over (salt, parent, tokens), 16 bytes a block.

Equal leading tokens under an equal root give equal names, on every node that shares the salt, so a head can tell where
a prefix is warm. The root folds in everything that must never be shared: the fleet's salt, the tenant, the request's own
`cache_salt` and the numeric path. A name is a hint for a search, never a proof: whoever reuses a block compares tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from struct import Struct, pack

HASH_BYTES = 16


@lru_cache(maxsize=1024)
def root_hash(
    salt: bytes, *, tenant: str = "", cache_salt: bytes = b"", variant: str = ""
) -> bytes:
    """Name the parent of a session's first block. Parts are length-prefixed: no two splits collide.

    Remembered for the last few tenants and salts: sessions come in many, these in few.
    """
    digest = sha256(b"superfluid-prefix/1")
    for part in (salt, tenant.encode(), cache_salt, variant.encode()):
        digest.update(pack("<I", len(part)))
        digest.update(part)
    return digest.digest()[:HASH_BYTES]


@lru_cache(maxsize=64)
def _layout(count: int) -> Struct:
    return Struct(f"<{count}I")


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Name the block that holds `tokens` right after the block named `parent`."""
    return sha256(parent + _layout(len(tokens)).pack(*tokens)).digest()[:HASH_BYTES]


def block_chain(root: bytes, tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """Name all full blocks at the front of `tokens`; a partly filled last block has none."""
    chain: list[bytes] = []
    parent = root
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        parent = block_hash(parent, tokens[start : start + block_tokens])
        chain.append(parent)
    return chain
