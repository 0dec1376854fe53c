"""From a checkpoint to the fused, placed tensors of a decoder.

Owns the fusing, and the check of every shape against ModelConfig: a file that contradicts its own configuration is refused with
the tensor's name, before anything runs. Where files keep their tensors is told by sources.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from superfluid_core.engine.torch.capabilities import compiled_gap, layer_gap
from superfluid_core.engine.torch.checkpoints import open_source
from superfluid_core.engine.torch.compressed.rows import Fp8Rows
from superfluid_core.engine.torch.experts import Expert, ExpertsBlock
from superfluid_core.engine.torch.layers import ACTIVATIONS, LayerWeights, no_product
from superfluid_core.engine.torch.linear import Linear, make_linear
from superfluid_core.engine.torch.models import DecoderWeights
from superfluid_core.engine.torch.quantized import (
    QuantizedRows,
    QuantizedWeights,
    assemble_quantized,
)
from superfluid_core.engine.torch.quantized_linear import Keeper
from superfluid_core.engine.torch.rope import rope_table
from superfluid_core.engine.torch.sources import GgufSource, WeightSource
from superfluid_core.engine.torch.weights_cache import (
    WeightsCache,
    cache_name,
    flatten,
    unflatten,
)
from superfluid_core.errors import ModelFilesError
from superfluid_core.modelfiles.config import ModelConfig

Shape = tuple[int, ...]
# what norms a layer has, as files call them: of attention and of the unit, then of what leaves each
NORMS = {
    "before": ("input_layernorm", "post_attention_layernorm"),
    "after": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "around": (
        "input_layernorm",
        "pre_feedforward_layernorm",
        "post_attention_layernorm",
        "post_feedforward_layernorm",
    ),
}


class Checkpoint(Protocol):
    """The part of ModelFiles that the engine reads."""

    @property
    def kind(self) -> str: ...

    @property
    def path(self) -> str | Path: ...

    @property
    def config(self) -> ModelConfig: ...

    def weights_fingerprint(self) -> str: ...

    def text_fingerprint(self) -> str: ...


class _Assembler:
    """Pulls tensors out of a source, checks shapes, fuses. `keeper`: matrices that the source has quantized stay so."""

    def __init__(self, source: WeightSource, config: ModelConfig, keeper: Keeper | None) -> None:
        self._source = source
        self._config = config
        self._keeper = keeper

    def tensor(self, name: str, shape: Shape) -> Tensor:
        tensor = self._source.get(name)
        _check_shape(name, tensor, shape)
        return tensor

    def fused(self, prefix: str, parts: dict[str, int], columns: int, *, bias: bool) -> Linear:
        """Stack the rows of several projections into one product."""
        shapes = {f"{prefix}.{part}.weight": (rows, columns) for part, rows in parts.items()}
        biases = [
            self.tensor(f"{prefix}.{part}.bias", (rows,)) for part, rows in parts.items() if bias
        ]
        added = torch.cat(biases) if biases else None
        kept = self.kept(shapes, added)
        if kept is not None:
            return kept
        weights = [self.tensor(name, shape) for name, shape in shapes.items()]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        return make_linear(weight.contiguous(), added)

    def kept(self, shapes: Mapping[str, Shape], bias: Tensor | None = None) -> Linear | None:
        """Stack matrices as the source quantized them; None where they are not to stay so, or one is plain."""
        find = getattr(self._source, "rows", None)  # a source of plain numbers need not have it
        if self._keeper is None or find is None:
            return None
        parts: list[QuantizedRows | Fp8Rows] = []
        for name, shape in shapes.items():
            rows: QuantizedRows | Fp8Rows | None = find(name)
            if rows is None:
                return None
            _check_shape(name, rows.q if isinstance(rows, QuantizedRows) else rows.weight, shape)
            parts.append(rows)
        return self._keeper.linear(parts, bias)

    def layer(self, number: int) -> LayerWeights:
        config, prefix = self._config, f"model.layers.{number}"
        hidden, attention = config.hidden, f"{prefix}.self_attn"
        q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
        qkv = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        norms = [self.tensor(f"{prefix}.{name}.weight", (hidden,)) for name in NORMS[config.norms]]
        is_mixture = config.is_mixture(number)
        is_local = number in config.nope_layers or (
            config.local_rope_theta > 0 and config.window_of(number) is not None
        )
        unit = Expert(no_product, no_product)
        if not is_mixture:
            unit = self._unit(f"{prefix}.mlp", config.intermediate)
        return LayerWeights(
            attention_norm=norms[0],
            qkv=self.fused(attention, qkv, hidden, bias=config.attention_bias),
            qk_norm=self._qk_norm(attention) if config.qk_norm else None,
            out=self.fused(attention, {"o_proj": hidden}, q_rows, bias=config.attention_out_bias),
            mlp_norm=norms[1],
            gate_up=unit.gate_up,
            down=unit.down,
            attention_out_norm=norms[2] if len(norms) > 2 else None,
            mlp_out_norm=norms[3] if len(norms) > 2 else None,
            experts=self._experts(f"{prefix}.mlp") if is_mixture else None,
            query_factor=1.0 if config.qk_norm else config.query_factor,
            is_local=is_local,
            is_common=layer_gap(config) is None,
        )

    def _unit(self, prefix: str, wide: int) -> Expert:
        hidden, bias = self._config.hidden, self._config.mlp_bias
        return Expert(
            self.fused(prefix, {"gate_proj": wide, "up_proj": wide}, hidden, bias=bias),
            self.fused(prefix, {"down_proj": hidden}, wide, bias=bias),
        )

    def _experts(self, prefix: str) -> ExpertsBlock:
        config = self._config
        mixture = config.mixture
        assert mixture is not None
        router = self.tensor(f"{prefix}.gate.weight", (mixture.count, config.hidden))
        experts = [
            self._unit(f"{prefix}.experts.{number}", mixture.intermediate)
            for number in range(mixture.count)
        ]
        act = ACTIVATIONS[config.activation]
        return ExpertsBlock(make_linear(router), experts, mixture, act)

    def _qk_norm(self, attention: str) -> Tensor:
        """Both norms as rows of heads; what scales queries goes along, for it costs nothing here."""
        config = self._config
        parts = []
        for name, heads in (("q_norm", config.heads), ("k_norm", config.kv_heads)):
            width = heads * config.head_dim if config.qk_norm_whole else config.head_dim
            own = self.tensor(f"{attention}.{name}.weight", (width,))
            parts.append(own.view(-1, config.head_dim).expand(heads, -1))
        if config.query_factor != 1.0:
            parts[0] = parts[0] * config.query_factor
        return torch.cat(parts)


def _check_shape(name: str, tensor: Tensor, shape: Shape) -> None:
    found = tuple(tensor.shape)
    if found != shape:
        raise ModelFilesError(f"tensor {name!r} is {found}, the configuration says {shape}")


def assemble(
    source: WeightSource, config: ModelConfig, window: int, keeper: Keeper | None = None
) -> DecoderWeights:
    """All weights of a decoder. Raises ModelFilesError for a missing, odd or misshapen tensor.

    With a `keeper`, matrices that the source has quantized stay so, the head too; the table of embeddings, of which a step reads a few
    rows, does not. A tied model then has both: its head is read whole in every step.
    """
    take = _Assembler(source, config, keeper)
    shape = (config.vocabulary, config.hidden)
    embedding = take.tensor("model.embed_tokens.weight", shape)
    top = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
    head = take.kept({top: shape})
    if head is None:
        head = make_linear(embedding if config.tied_embeddings else take.tensor(top, shape))
    factors, scaling = None, config.rope_scaling
    if scaling.kind == "factors":
        factors = take.tensor("rope_freqs", (config.turned // 2,))
    elif scaling.kind == "long_factors":
        both = [
            take.tensor(f"rope_factors_{kind}", (config.turned // 2,)) for kind in ("short", "long")
        ]
        factors = both[window > scaling.original_max_position]
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(take.layer(number) for number in range(config.layers)),
        final_norm=take.tensor("model.norm.weight", (config.hidden,)),
        head=head,
        rope=rope_table(config, window, embedding.device, factors),
    )


class Loaded(NamedTuple):
    """A decoder's weights; `quantized` are the same ones as a GGUF file quantized them, where that was wanted and is so.

    `kept` says in words that products in `plain` are by quantized matrices, where they are.
    """

    plain: DecoderWeights
    quantized: QuantizedWeights | None = None
    kept: str = ""


class _Kept:
    """A source of tensors that were read before, or that notes what is read."""

    def __init__(self, tensors: dict[str, Tensor], source: WeightSource | None = None) -> None:
        self.tensors = tensors
        self._source = source

    def has(self, name: str) -> bool:
        return name in self.tensors or (self._source is not None and self._source.has(name))

    def get(self, name: str) -> Tensor:
        found = self.tensors.get(name)
        if found is None:
            if self._source is None:
                raise ModelFilesError(f"the cached weights have no tensor {name!r}")
            found = self.tensors[name] = self._source.get(name).contiguous()
        return found


def load_weights(
    files: Checkpoint,
    window: int,
    device: torch.device,
    dtype: torch.dtype,
    keeper: Keeper | None = None,
) -> DecoderWeights:
    """Read the weights of a model from whatever files it has; `keeper` as in `assemble`."""
    path, config = Path(files.path), files.config
    with open_source(path, files.kind, config, device, dtype) as source:
        return assemble(source, config, window, keeper)


def load_cached(files: Checkpoint, window: int, dtype: torch.dtype, folder: Path) -> Loaded:
    """Read a GGUF file for the CPU through the cache in `folder`, with its quantized weights if it has them."""
    path, config, cache = Path(files.path), files.config, WeightsCache(folder)
    name = cache_name(path, dtype)
    found = cache.read(name)
    if found is not None:
        tensors, notes = found
        quantized = unflatten(tensors, notes, config.layers)
        return Loaded(assemble(_Kept(tensors), config, window), quantized)
    with GgufSource(path, config, torch.device("cpu"), dtype) as source:
        kept = _Kept({}, source)
        plain = assemble(kept, config, window)
        quantized = None if compiled_gap(config) else assemble_quantized(source, config)
    more: tuple[dict[str, Tensor], dict[str, str]] = ({}, {})
    if quantized is not None:
        more = flatten(quantized)
    cache.write(name, kept.tensors | more[0], more[1])
    return Loaded(plain, quantized)
