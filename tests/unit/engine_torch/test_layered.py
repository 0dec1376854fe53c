"""Attention where layers see differently far, scores with a cap, and the shares of a rank: the parts that families need."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from superfluid_core.engine.compose import StepRow
from superfluid_core.engine.torch.attention.base import (
    AttentionShape,
    DecodeAttention,
    FusedAttention,
)
from superfluid_core.engine.torch.attention.capped import capped_attention
from superfluid_core.engine.torch.attention.layered import LayeredAttention
from superfluid_core.engine.torch.attention.reference import ReferenceAttention
from superfluid_core.engine.torch.attention.registry import BACKENDS, is_padded, make_attention
from superfluid_core.engine.torch.batch import Batch, BlockTables, compose_batch
from superfluid_core.engine.torch.experts import ExpertsBlock
from superfluid_core.engine.torch.kvcache import KvPool, KvShape
from superfluid_core.engine.torch.parallel.shards import ShardedSource, local_config
from superfluid_core.engine.torch.weights import assemble
from superfluid_core.errors import ConfigError
from superfluid_core.modelfiles.config import config_from_hf
from superfluid_core.scheduler.plan import LanePlan

CPU = torch.device("cpu")
SHAPE = AttentionShape(4, 2, 16, sliding_window=6, soft_cap=1.5, full_layers=(1,))


def pool() -> KvPool:
    made = KvPool(KvShape(3, 16, 4, 2, 16, torch.float32), CPU)
    generator = torch.Generator().manual_seed(1)
    for part in (*made.keys, *made.values):
        part.copy_(torch.randn(part.shape, generator=generator))
    return made


def batch() -> Batch:
    """One lane that decodes, one whose prompt comes in two chunks, one that begins."""
    lanes = [
        LanePlan(0, True, 14, (1,), 1, 0, (5, 9, 2, 12)),
        LanePlan(1, False, 9, (1,) * 7, 1, 0, (7, 3, 11, 1)),
        LanePlan(2, False, 0, (1,) * 10, 1, 0, (0, 4, 8)),
    ]
    rows = [
        StepRow(lane.lane, lane.computed, lane.inputs, True, 0, lane.decoding) for lane in lanes
    ]
    return compose_batch(rows, BlockTables(lanes, 4), CPU)


def run(backend: Any, layer: int) -> Tensor:
    step = batch()
    backend.plan(step)
    generator = torch.Generator().manual_seed(layer)
    drawn = [torch.randn(step.tokens, heads, 16, generator=generator) for heads in (4, 2, 2)]
    out: Tensor = backend.run(layer, *drawn)
    return out


@pytest.mark.parametrize("name", ["padded", "reference"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_each_layer_sees_as_far_as_it_should_with_its_scores_capped(name: str, layer: int) -> None:
    window = None if layer == 1 else 6
    alone = replace(SHAPE, sliding_window=window, full_layers=())
    found = run(make_attention(name, pool(), SHAPE), layer)
    torch.testing.assert_close(found, run(ReferenceAttention(pool(), alone), layer))
    other = replace(alone, sliding_window=6 if window is None else None)
    assert not torch.allclose(found, run(ReferenceAttention(pool(), other), layer), atol=1e-3)


def test_a_model_of_several_reaches_has_what_both_of_its_parts_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int | None, int]] = []

    class Fused(ReferenceAttention):
        def __init__(self, own: KvPool, shape: AttentionShape) -> None:
            super().__init__(own, shape)
            self.window = shape.sliding_window

        def run_qkv(self, layer: int, qkv: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
            asked.append((self.window, layer))
            return qkv

    monkeypatch.setitem(BACKENDS, "fused", Fused)
    fused: Any = make_attention("fused", pool(), SHAPE)
    assert all(isinstance(fused, kind) for kind in (FusedAttention, DecodeAttention))
    for layer in range(3):
        fused.run_qkv(layer, torch.zeros(1), (torch.zeros(1), torch.zeros(1)))
    assert asked == [(6, 0), (None, 1), (6, 2)]
    padded: Any = make_attention("padded", pool(), SHAPE)
    assert isinstance(padded, LayeredAttention)
    assert not hasattr(padded, "run_qkv")
    assert not hasattr(padded, "plan_decode")
    assert is_padded(padded)
    assert not is_padded(fused)
    plain = replace(SHAPE, full_layers=())
    assert not isinstance(make_attention("padded", pool(), plain), LayeredAttention)


def test_capped_scores_in_pieces_equal_those_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(4)
    queries = torch.randn(3, 2, 5, 8, generator=generator)
    keys, values = torch.randn(2, 3, 1, 9, 8, generator=generator)
    mask = torch.zeros(5, 9).masked_fill_(torch.ones(5, 9).triu(5).bool(), -torch.inf)
    whole = capped_attention(queries, keys, values, mask, 0.7)
    scores = 0.7 * (torch.matmul(queries, keys.transpose(-1, -2)) * 8**-0.5 / 0.7).tanh() + mask
    torch.testing.assert_close(whole, torch.matmul(scores.softmax(-1), values))
    monkeypatch.setattr("superfluid_core.engine.torch.attention.capped.SCORES_MAX", 8)
    torch.testing.assert_close(capped_attention(queries, keys, values, mask, 0.7), whole)


MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "norm_topk_prob": True,
}


TENSORS: dict[str, tuple[int, ...]] = {
    "embed_tokens": (50, 32), "lm_head": (50, 32), "norm": (32,), "gate": (5, 32),
    "q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32), "o_proj": (32, 32),
    "gate_proj": (12, 32), "up_proj": (12, 32), "down_proj": (32, 12),
    "q_norm": (8,), "k_norm": (8,),
}  # fmt: skip


class Drawn:
    """Any tensor of that model, the same for the same name."""

    def has(self, name: str) -> bool:
        return name.split(".")[-2] in TENSORS

    def get(self, name: str) -> Tensor:
        part = name.split(".")[-2]
        generator = torch.Generator().manual_seed(sum(name.encode()))
        return torch.randn(TENSORS.get(part, (32,)), generator=generator)


def test_ranks_shares_of_the_experts_add_up_to_the_whole() -> None:
    config = config_from_hf(MIXTURE)
    whole = assemble(Drawn(), config, 64).layers[0].experts
    parts = [
        assemble(ShardedSource(Drawn(), rank, 2), local_config(config, 2), 64).layers[0].experts
        for rank in range(2)
    ]
    x = torch.randn(7, 32, generator=torch.Generator().manual_seed(3))
    assert isinstance(whole, ExpertsBlock)
    added = [part(x) for part in parts if part is not None]
    torch.testing.assert_close(added[0] + added[1], whole(x), atol=1e-4, rtol=1e-4)


def test_a_model_whose_norms_span_all_heads_is_not_cut_among_ranks() -> None:
    olmo = {**MIXTURE, "architectures": ["Olmo2ForCausalLM"]}
    with pytest.raises(ConfigError, match=r"--tensor-parallel 2: .* norms queries and keys"):
        local_config(config_from_hf(olmo), 2)
    odd = config_from_hf({**MIXTURE, "moe_intermediate_size": 9})
    with pytest.raises(ConfigError, match="9 rows of an expert"):
        local_config(odd, 2)
