"""Checks of single kernels: random shapes and numbers, beside what plain torch makes of them.

Owns the draw of shapes from a seed, so that a failure can be repeated. Shapes are small where Triton interprets and large on a device.
Comparisons are in the kernel's own dtype with a bound that its rounding allows; what is only moved must be equal.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everyone knows it by
from torch import Tensor

from superfluid_core.engine.compose import StepRow
from superfluid_core.engine.torch.attention.base import (
    AttentionBackend,
    AttentionShape,
    DecodeAttention,
    DecodeState,
    FusedAttention,
    Site,
)
from superfluid_core.engine.torch.attention.choose import TOLERANCES, unfit
from superfluid_core.engine.torch.attention.reference import ReferenceAttention
from superfluid_core.engine.torch.attention.registry import make_attention
from superfluid_core.engine.torch.batch import Batch, BlockTables, compose_batch
from superfluid_core.engine.torch.draw import TOP_K_OFF, DrawColumns, draw_sorted_rows
from superfluid_core.engine.torch.kvcache import KvPool, KvShape
from superfluid_core.engine.torch.layers import LayerWeights, plain_layer
from superfluid_core.engine.torch.linear import PlainLinear
from superfluid_core.engine.torch.philox import philox
from superfluid_core.engine.torch.rope import rotate
from superfluid_core.engine.torch.selftest.model import config_for
from superfluid_core.engine.torch.selftest.report import Check, Found, LeftOut, near, run_check
from superfluid_core.scheduler.plan import LanePlan

GROUPS = ((1, 1), (4, 2), (6, 2), (7, 1), (8, 8), (16, 2))
HEAD_DIMS = (16, 32, 64, 80, 128)
HEAD_DIMS_SMALL = (16, 24, 32)
BACKENDS_LISTED = ("flashinfer", "varlen", "triton", "padded")
DRAW_ROWS = 6


@dataclass(frozen=True, slots=True)
class Bench:
    """Where checks run and how large they are."""

    device: torch.device
    dtype: torch.dtype
    seed: int

    @property
    def is_small(self) -> bool:
        return self.device.type != "cuda"

    @property
    def bound(self) -> float:
        return TOLERANCES[self.dtype]

    def noise(self, *sizes: int) -> Tensor:
        """Numbers that every device gets alike."""
        generator = torch.Generator().manual_seed(self.seed * 1_000 + sum(sizes))
        return torch.randn(sizes, generator=generator).to(self.dtype).to(self.device)


@dataclass(frozen=True, slots=True)
class Scene:
    """A random ragged step over a pool of noise."""

    site: Site
    lanes: list[LanePlan]
    blocks: int

    @property
    def batch(self) -> Batch:
        rows = [StepRow(p.lane, p.computed, p.inputs, True, 0, p.decoding) for p in self.lanes]
        return compose_batch(
            rows, BlockTables(self.lanes, self.site.block_tokens), self.site.device
        )

    def pool(self, bench: Bench) -> KvPool:
        shape = self.site.shape
        sizes = (self.blocks, self.site.block_tokens, shape.kv_heads, shape.head_dim)
        pool = KvPool(KvShape(1, *sizes, self.site.dtype), self.site.device)
        pool.keys[0].copy_(bench.noise(*sizes))
        pool.values[0].copy_(bench.noise(*sizes) * 0.5)
        return pool

    def projected(self, bench: Bench, tokens: int) -> Tensor:
        shape = self.site.shape
        return bench.noise(tokens, shape.heads + 2 * shape.kv_heads, shape.head_dim)


def draw_scene(bench: Bench, *, is_decoding: bool = False) -> Scene:
    """Draw heads, window, lanes and blocks from the seed."""
    source = random.Random(bench.seed)
    heads, kv_heads = source.choice(GROUPS)
    head_dim = source.choice(HEAD_DIMS_SMALL if bench.is_small else HEAD_DIMS)
    size = source.choice((4, 16) if bench.is_small else (16, 64))
    longest = 40 if bench.is_small else 3_000
    window = source.choice((None, None, 5, longest // 2))
    shape = AttentionShape(heads, kv_heads, head_dim, window)
    plans: list[tuple[bool, int, int]] = [
        (True, source.randrange(longest), 1) for _ in range(source.randrange(1, 5))
    ]
    if not is_decoding:
        chunks = source.randrange(1, 3)
        plans += [
            (False, source.choice((0, source.randrange(longest))), source.randrange(1, longest))
            for _ in range(chunks)
        ]
    needed = [-(-(past + count) // size) for _, past, count in plans]
    order = list(range(sum(needed) + 2))
    source.shuffle(order)
    lanes = []
    for number, ((is_decode, past, count), blocks) in enumerate(zip(plans, needed, strict=True)):
        own, order = tuple(order[:blocks]), order[blocks:]
        lanes.append(LanePlan(number, is_decode, past, (1,) * count, 1, 0, own))
    return Scene(Site(bench.device, bench.dtype, size, shape), lanes, sum(needed) + 2)


def kernel_checks(bench: Bench) -> Iterator[Check]:
    """Run every check of this seed."""
    for name in BACKENDS_LISTED:
        yield run_check(f"attention {name}", partial(_attention, bench, name))
    checks: dict[str, Callable[[Bench], str]] = {
        "attention triton, turned and stored in one pass": _fused,
        "attention triton, decoding from fixed tensors": _decode_state,
        "add and norm": _add_norm,
        "gate and up": _silu_mul,
        "a whole layer": _layer,
    }
    if bench.dtype is torch.float32:  # these have numbers of their own
        checks |= {"draw of open rows": _draw_open, "noise by value": _noise}
    for name, check in checks.items():
        yield run_check(name, partial(check, bench))


def _backend(scene: Scene, name: str, pool: KvPool) -> AttentionBackend:
    reason = unfit(name, scene.site)
    if reason is not None:
        raise LeftOut(reason)
    return make_attention(name, pool, scene.site.shape)


def _split(scene: Scene, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    heads, kv_heads = scene.site.shape.heads, scene.site.shape.kv_heads
    return qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]


def _equal_pools(found: KvPool, wanted: KvPool) -> None:
    for a, b in ((found.keys[0], wanted.keys[0]), (found.values[0], wanted.values[0])):
        if not torch.equal(a, b):
            raise Found("keys or values were stored wrongly")


def _attention(bench: Bench, name: str) -> str:
    scene = draw_scene(bench)
    batch, pools = scene.batch, (scene.pool(bench), scene.pool(bench))
    parts = _split(scene, scene.projected(bench, batch.tokens))
    outs = []
    reference = ReferenceAttention(pools[1], scene.site.shape)
    for backend in (_backend(scene, name, pools[0]), reference):
        backend.plan(batch)
        outs.append(backend.run(0, *parts))
    _equal_pools(*pools)
    return near(outs[0], outs[1], bench.bound)


def _turned(scene: Scene, bench: Bench, tokens: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    width = scene.site.shape.head_dim
    angles = bench.noise(tokens, 1, width // 2).float() * 3
    angles = torch.cat((angles, angles), -1)
    sign = torch.ones(width, device=bench.device)
    sign[: width // 2] = -1
    return scene.projected(bench, tokens), (angles.cos(), angles.sin() * sign)


def _fused(bench: Bench) -> str:
    scene = draw_scene(bench)
    batch, pools = scene.batch, (scene.pool(bench), scene.pool(bench))
    qkv, turn = _turned(scene, bench, batch.tokens)
    shape = scene.site.shape
    backend = _backend(scene, "triton", pools[0])
    assert isinstance(backend, FusedAttention)
    backend.plan(batch)
    found = backend.run_qkv(0, qkv, turn)
    both = shape.heads + shape.kv_heads
    turned = torch.cat((rotate(qkv[:, :both], *turn), qkv[:, both:]), 1)
    reference = ReferenceAttention(pools[1], shape)
    reference.plan(batch)
    wanted = reference.run(0, *_split(scene, turned))
    for a, b in ((pools[0].keys[0], pools[1].keys[0]), (pools[0].values[0], pools[1].values[0])):
        near(a, b, bench.bound)
    return near(found, wanted, bench.bound)


def _decode_state(bench: Bench) -> str:
    scene = draw_scene(bench, is_decoding=True)
    batch, pools = scene.batch, (scene.pool(bench), scene.pool(bench))
    rows = len(scene.lanes)
    parts = _split(scene, scene.projected(bench, rows))
    tables = batch.tables.to(torch.int32).to(bench.device)
    longest = tables.shape[1] * scene.site.block_tokens
    state = DecodeState(batch.ids, batch.positions.clone(), batch.slots, tables, longest)
    backend = _backend(scene, "triton", pools[0])
    assert isinstance(backend, DecodeAttention)
    backend.plan_decode(state)
    reference = ReferenceAttention(pools[1], scene.site.shape)
    reference.plan(batch)
    wanted = reference.run(0, *parts)
    near(backend.run(0, *parts), wanted, bench.bound)
    reference.plan_decode(state)
    return near(reference.run(0, *parts), wanted, bench.bound)


def _passes(bench: Bench) -> None:
    reason = unfit("triton", draw_scene(bench).site)
    if reason is not None:
        raise LeftOut(reason)


def _add_norm(bench: Bench) -> str:
    _passes(bench)
    from superfluid_core.engine.torch.triton.passes import add_norm

    width = 96 + 8 * bench.seed if bench.is_small else 4096
    rows, added = bench.noise(5, width), bench.noise(5, width) * 0.5
    weight = bench.noise(1, width).flatten()
    kept = rows.clone()
    found = add_norm(rows, added, weight, 1e-5)
    summed = kept + added
    if not torch.equal(rows, summed):
        raise Found("the sum is not that of torch")
    near(add_norm(summed.clone(), None, weight, 1e-5), found, 0.0)
    wanted = F.rms_norm(summed.float(), (width,), weight.float(), 1e-5)
    return near(found, wanted, bench.bound * 2)


def _silu_mul(bench: Bench) -> str:
    _passes(bench)
    from superfluid_core.engine.torch.triton.passes import silu_mul

    width = 1030 if bench.is_small else 14336
    gate_up = bench.noise(3, 2 * width)
    gate, up = gate_up.float().chunk(2, -1)
    return near(silu_mul(gate_up), F.silu(gate) * up, bench.bound * 4)


def layer_of(bench: Bench, shape: AttentionShape, *, is_normed: bool) -> LayerWeights:
    """Make a layer of noise."""
    hidden, wide = 48, 80
    rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    turned = shape.heads + shape.kv_heads
    return LayerWeights(
        attention_norm=bench.noise(hidden) * 0.1 + 1,
        qkv=PlainLinear(bench.noise(rows, hidden) / hidden**0.5),
        qk_norm=bench.noise(turned, shape.head_dim) * 0.1 + 1 if is_normed else None,
        out=PlainLinear(bench.noise(hidden, shape.heads * shape.head_dim) / 16),
        mlp_norm=bench.noise(1, hidden).flatten() * 0.1 + 1,
        gate_up=PlainLinear(bench.noise(2 * wide, hidden) / hidden**0.5),
        down=PlainLinear(bench.noise(hidden, wide) / wide**0.5),
    )


def _layer(bench: Bench) -> str:
    """Compute a layer by kernels and by plain torch, with norms of queries and keys at every other seed."""
    scene = draw_scene(bench)
    batch, pools = scene.batch, (scene.pool(bench), scene.pool(bench))
    shape = scene.site.shape
    backend = _backend(scene, "triton", pools[0])
    reference = ReferenceAttention(pools[1], shape)
    from superfluid_core.engine.torch.triton.layer import fused_layer

    weights = layer_of(bench, shape, is_normed=bench.seed % 2 == 0)
    config = config_for(shape)
    x = bench.noise(batch.tokens, 48)
    turn = _turned(scene, bench, batch.tokens)[1]
    backend.plan(batch)
    reference.plan(batch)
    found = fused_layer(x.clone(), weights, config, turn, (backend, 0))
    return near(found, plain_layer(x, weights, config, turn, (reference, 0)), bench.bound * 4)


def draw_columns(bench: Bench, vocabulary: int) -> tuple[Tensor, DrawColumns, Tensor]:
    """Draw scores with ties and holes, filters of all kinds, and what to draw by."""
    source = random.Random(bench.seed)
    generator = torch.Generator().manual_seed(bench.seed)
    scores = torch.randn((DRAW_ROWS, vocabulary), generator=generator) * source.choice((0.2, 1, 4))
    scores[0] = (scores[0] * 2).round() / 2  # many equal values
    scores[1, :: source.choice((2, 3, 7))] = -torch.inf
    likely = [source.choice((0.0, 0.0, 0.02, 0.3)) for _ in range(DRAW_ROWS)]
    share = [source.choice((1.0, 0.95, 0.5, 0.05)) for _ in range(DRAW_ROWS)]
    count = [source.choice((TOP_K_OFF, 1, 70, vocabulary // 2)) for _ in range(DRAW_ROWS)]
    columns = DrawColumns(
        temperature=torch.ones(DRAW_ROWS, device=bench.device),
        top_k=torch.tensor(count, device=bench.device),
        min_p=torch.tensor(likely, dtype=torch.float64, device=bench.device),
        top_p=torch.tensor(share, dtype=torch.float64, device=bench.device),
        plain=None,
        filtered=None,
        unbounded=True,
    )
    uniform = torch.rand(DRAW_ROWS, dtype=torch.float64, generator=generator)
    return scores.to(bench.device), columns, uniform.to(bench.device)


def _draw_open(bench: Bench) -> str:
    _passes(bench)
    from superfluid_core.engine.torch.triton.draw import draw_open

    scores, columns, uniform = draw_columns(bench, 200 if bench.is_small else 128_000)
    wanted = draw_sorted_rows(scores, columns, uniform)
    settled = torch.zeros(DRAW_ROWS, dtype=torch.bool, device=bench.device)
    settled[-1] = True
    found = torch.full((DRAW_ROWS,), -7, device=bench.device)
    strided = torch.stack((uniform, 1 - uniform), 1)[:, 0]  # as a column of a stretch's noise
    draw_open(scores, columns, strided, settled, found)
    if int(found[-1]) != -7:
        raise Found("a settled row was drawn again")
    if not torch.equal(found[:-1], wanted[:-1]):
        raise Found(f"drew {found[:-1].tolist()}, sorting draws {wanted[:-1].tolist()}")
    return f"{DRAW_ROWS - 1} rows equal"


VECTOR = (
    (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
    (0xA4093822, 0x299F31D0),
    (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
)


def _noise(bench: Bench) -> str:
    """Draw the published vector, and from random words, on this device as on the CPU."""
    words = [torch.tensor([word], device=bench.device) for word in (*VECTOR[0], *VECTOR[1])]
    known = philox(tuple(words[:4]), (words[4], words[5]))
    if [int(word) for word in known] != list(VECTOR[2]):
        raise Found("the published vector does not come out")
    generator = torch.Generator().manual_seed(bench.seed)
    drawn = [torch.randint(0, 1 << 32, (1000,), generator=generator) for _ in range(6)]
    here = philox(tuple(drawn[:4]), (drawn[4], drawn[5]))
    moved = [word.to(bench.device) for word in drawn]
    there = philox(tuple(moved[:4]), (moved[4], moved[5]))
    if not all(torch.equal(a, b.cpu()) for a, b in zip(here, there, strict=True)):
        raise Found("the device draws other numbers than the CPU")
    return "4,004 words equal"
