"""A rank's share of a model: whole heads, and rows of the gated unit; what comes together again is added up.

Owns which rows or columns of which tensor a rank takes. Query, key, value, gate and up are cut by rows; the two products behind them by
columns, whose results are partial sums that the ranks add. Embedding, norms and the head are everybody's: logits come out alike on all
ranks, and so does what is drawn from them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from superfluid_core.engine.torch.capabilities import split_gap
from superfluid_core.engine.torch.checkpoints import open_source
from superfluid_core.engine.torch.compressed.rows import Fp8Rows
from superfluid_core.engine.torch.linear import Linear
from superfluid_core.engine.torch.models import DecoderWeights
from superfluid_core.engine.torch.parallel.group import Ranks
from superfluid_core.engine.torch.quantized import GROUP, QuantizedRows
from superfluid_core.engine.torch.quantized_linear import Keeper
from superfluid_core.engine.torch.sources import WeightSource
from superfluid_core.engine.torch.weights import Checkpoint, assemble
from superfluid_core.errors import ConfigError
from superfluid_core.modelfiles.config import ModelConfig

ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
COLUMNS = ("o_proj", "down_proj")


def local_config(config: ModelConfig, world: int) -> ModelConfig:
    """Cut a model's sizes down to one rank's. Raises ConfigError when they do not come out even."""
    gap, mixture = split_gap(config), config.mixture
    if gap is not None:
        raise ConfigError(f"--tensor-parallel {world}: the model cannot be cut, {gap}")
    for count, name in (
        (config.heads, "heads"),
        (config.kv_heads, "key heads"),
        (config.intermediate, "rows of the gated unit"),
        (0 if mixture is None else mixture.intermediate, "rows of an expert"),
    ):
        if count % world:
            raise ConfigError(f"--tensor-parallel {world}: the model has {count} {name}")
    return replace(
        config,
        heads=config.heads // world,
        kv_heads=config.kv_heads // world,
        intermediate=config.intermediate // world,
        mixture=mixture and replace(mixture, intermediate=mixture.intermediate // world),
    )


class ShardedSource:
    """A source that gives each tensor's share of one rank."""

    def __init__(self, source: WeightSource, rank: int, world: int) -> None:
        self._source = source
        self._rank, self._world = rank, world

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def rows(self, name: str) -> QuantizedRows | Fp8Rows | None:
        """Find a share of a matrix that the source has quantized; None where it has not, or where scales do not let it be cut."""
        find = getattr(self._source, "rows", None)
        whole: QuantizedRows | Fp8Rows | None = None if find is None else find(name)
        part = name.split(".")[-2]
        if whole is None or part not in (*ROWS, *COLUMNS):
            return whole
        return share_of(whole, 0 if part in ROWS else 1, self._rank, self._world)

    def get(self, name: str) -> Tensor:
        whole = self._source.get(name)
        part = name.split(".")[-2] if "." in name else name
        if part in ROWS:
            return whole.chunk(self._world, 0)[self._rank].contiguous()
        if part in COLUMNS and name.endswith(".weight"):
            return whole.chunk(self._world, 1)[self._rank].contiguous()
        if part in COLUMNS and self._rank:
            return torch.zeros_like(whole)  # a bias is added once
        return whole


def share_of(
    rows: QuantizedRows | Fp8Rows, dimension: int, rank: int, world: int
) -> QuantizedRows | Fp8Rows | None:
    """Cut quantized rows by outputs (0) or inputs (1); None where shares would part what has one scale."""

    def cut(tensor: Tensor) -> Tensor:
        return tensor.chunk(world, dimension)[rank].contiguous()

    if isinstance(rows, QuantizedRows):
        is_parted = dimension == 1 and rows.q.shape[1] % (world * GROUP)
        return None if is_parted else rows.reordered(cut)
    if rows.scale.shape[dimension] == 1:  # one for all, which each share then has
        return replace(rows, weight=cut(rows.weight))
    if rows.weight.shape[dimension] % (world * rows.block[dimension]):
        return None
    return replace(rows, weight=cut(rows.weight), scale=cut(rows.scale))


class AddedLinear:
    """A product whose result is one rank's part of a sum."""

    __slots__ = ("_linear", "_ranks")

    def __init__(self, linear: Linear, ranks: Ranks) -> None:
        self._linear = linear
        self._ranks = ranks

    def __call__(self, x: Tensor) -> Tensor:
        return self._ranks.add(self._linear(x))


def load_shard(
    files: Checkpoint,
    window: int,
    dtype: torch.dtype,
    ranks: Ranks,
    keeper: Keeper | None = None,
) -> DecoderWeights:
    """Read this rank's share of the weights, as `load_weights` reads them all."""
    path, config = Path(files.path), files.config
    with open_source(path, files.kind, config, ranks.device, dtype) as source:
        shard = ShardedSource(source, ranks.rank, ranks.world)
        weights = assemble(shard, local_config(config, ranks.world), window, keeper)
    layers = tuple(
        replace(
            layer,
            out=AddedLinear(layer.out, ranks),
            down=AddedLinear(layer.down, ranks),
            experts=layer.experts and AddedLinear(layer.experts, ranks),
        )
        for layer in weights.layers
    )
    return replace(weights, layers=layers)
