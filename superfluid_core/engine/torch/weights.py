"""From a checkpoint to the fused, placed tensors of a decoder.

Owns the names under which checkpoints keep their tensors, the fusing, and the check of every shape against ModelConfig:
a file that contradicts its own configuration is refused with the tensor's name, before anything runs. Nothing that can
execute is ever read.

    safetensors  one file or many, memory-mapped by the library, straight to device and dtype
    GGUF         dequantized once, tensor by tensor; `llama` files keep query and key rows interleaved (pairs that turn
                 together lie side by side), which is undone here
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from superfluid_core.engine.torch.dequant import dequantize
from superfluid_core.engine.torch.layers import LayerWeights
from superfluid_core.engine.torch.linear import Linear, make_linear
from superfluid_core.engine.torch.models import DecoderWeights
from superfluid_core.engine.torch.quantized import (
    QuantizedRows,
    QuantizedWeights,
    assemble_quantized,
    read_rows,
)
from superfluid_core.engine.torch.rope import rope_table
from superfluid_core.engine.torch.weights_cache import (
    WeightsCache,
    cache_name,
    flatten,
    unflatten,
)
from superfluid_core.errors import ModelFilesError
from superfluid_core.modelfiles.config import ModelConfig
from superfluid_core.modelfiles.gguf import GgufFile
from superfluid_core.modelfiles.safetensors import SafetensorsIndex

Shape = tuple[int, ...]


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


class WeightSource(Protocol):
    """Tensors by their Hugging Face name, on the wanted device, in the wanted dtype."""

    def has(self, name: str) -> bool: ...

    def get(self, name: str) -> Tensor: ...


class SafetensorsSource(AbstractContextManager["SafetensorsSource"]):
    """A directory of safetensors; files are opened when first needed and closed together."""

    def __init__(self, directory: Path, device: torch.device, dtype: torch.dtype) -> None:
        self._index = SafetensorsIndex.open(directory)
        self._names = frozenset(self._index.names())
        self._device, self._dtype = device, dtype
        self._files: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.clear()
        self._stack.close()

    def has(self, name: str) -> bool:
        return name in self._names

    def get(self, name: str) -> Tensor:
        if name not in self._names:
            raise ModelFilesError(f"the checkpoint has no tensor {name!r}")
        path = Path(self._index.locate(name)[0])
        try:
            file = self._files.get(path)
            if file is None:
                file = self._stack.enter_context(
                    safe_open(path, framework="pt", device=str(self._device))
                )
                self._files[path] = file
            tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelFilesError(f"{path.name}: {error}") from error
        if not tensor.is_floating_point():
            raise ModelFilesError(f"tensor {name!r} is of type {tensor.dtype}, not a plain float")
        return tensor.to(self._dtype)


_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "rope_freqs": "rope_freqs.weight",
}


def gguf_name(name: str) -> str:
    """Translate the Hugging Face name of a tensor."""
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_GGUF_LAYER[part]}.{kind}"


def uninterleave(rows: Tensor, heads: int) -> Tensor:
    """Rows of pairs (0, 1), (2, 3) ... of each head -> first halves, then second halves."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


class GgufSource(AbstractContextManager["GgufSource"]):
    """A GGUF file, dequantized tensor by tensor."""

    def __init__(
        self, path: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._file = GgufFile.open(path)
        self._interleaved = self._file.metadata.get("general.architecture") == "llama"
        self._config, self._device, self._dtype = config, device, dtype

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def has(self, name: str) -> bool:
        return gguf_name(name) in self._file.tensors

    def get(self, name: str) -> Tensor:
        entry = self._file.tensors.get(gguf_name(name))
        if entry is None:
            raise ModelFilesError(f"the GGUF file has no tensor {gguf_name(name)!r}")
        tensor = dequantize(self._file.data(entry), entry.type, entry.shape, self._dtype)
        if self._interleaved and ".q_proj." in name:
            tensor = uninterleave(tensor, self._config.heads)
        elif self._interleaved and ".k_proj." in name:
            tensor = uninterleave(tensor, self._config.kv_heads)
        return tensor.to(self._device)

    def rows(self, name: str) -> QuantizedRows | None:
        """Find a matrix as the file quantized it; None where it holds plain numbers."""
        entry = self._file.tensors.get(gguf_name(name))
        found = (
            None if entry is None else read_rows(self._file.data(entry), entry.type, entry.shape)
        )
        if found is None or not self._interleaved:
            return found
        if ".q_proj." in name:
            return found.reordered(lambda rows: uninterleave(rows, self._config.heads))
        if ".k_proj." in name:
            return found.reordered(lambda rows: uninterleave(rows, self._config.kv_heads))
        return found


class _Assembler:
    """Pulls tensors out of a source, checks shapes, fuses."""

    def __init__(self, source: WeightSource, config: ModelConfig) -> None:
        self._source = source
        self._config = config

    def tensor(self, name: str, shape: Shape) -> Tensor:
        tensor = self._source.get(name)
        if tuple(tensor.shape) != shape:
            found = tuple(tensor.shape)
            raise ModelFilesError(f"tensor {name!r} is {found}, the configuration says {shape}")
        return tensor

    def fused(self, prefix: str, parts: dict[str, int], columns: int, *, bias: bool) -> Linear:
        """Stack the rows of several projections into one product."""
        weights = [
            self.tensor(f"{prefix}.{part}.weight", (rows, columns)) for part, rows in parts.items()
        ]
        biases = [
            self.tensor(f"{prefix}.{part}.bias", (rows,)) for part, rows in parts.items() if bias
        ]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        return make_linear(weight.contiguous(), torch.cat(biases) if biases else None)

    def layer(self, number: int) -> LayerWeights:
        config, prefix = self._config, f"model.layers.{number}"
        hidden, wide = config.hidden, config.intermediate
        q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
        qkv = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return LayerWeights(
            attention_norm=self.tensor(f"{prefix}.input_layernorm.weight", (hidden,)),
            qkv=self.fused(attention, qkv, hidden, bias=config.attention_bias),
            qk_norm=self._qk_norm(attention) if config.qk_norm else None,
            out=self.fused(attention, {"o_proj": hidden}, q_rows, bias=config.attention_out_bias),
            mlp_norm=self.tensor(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
            gate_up=self.fused(
                mlp, {"gate_proj": wide, "up_proj": wide}, hidden, bias=config.mlp_bias
            ),
            down=self.fused(mlp, {"down_proj": hidden}, wide, bias=config.mlp_bias),
        )

    def _qk_norm(self, attention: str) -> Tensor:
        config = self._config
        q = self.tensor(f"{attention}.q_norm.weight", (config.head_dim,))
        k = self.tensor(f"{attention}.k_norm.weight", (config.head_dim,))
        return torch.cat((q.expand(config.heads, -1), k.expand(config.kv_heads, -1)))


def assemble(source: WeightSource, config: ModelConfig, window: int) -> DecoderWeights:
    """All weights of a decoder. Raises ModelFilesError for a missing, odd or misshapen tensor."""
    take = _Assembler(source, config)
    embedding = take.tensor("model.embed_tokens.weight", (config.vocabulary, config.hidden))
    head = embedding
    if not config.tied_embeddings:
        head = take.tensor("lm_head.weight", (config.vocabulary, config.hidden))
    factors = None
    if config.rope_scaling.kind == "factors":
        factors = take.tensor("rope_freqs", (config.head_dim // 2,))
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(take.layer(number) for number in range(config.layers)),
        final_norm=take.tensor("model.norm.weight", (config.hidden,)),
        head=make_linear(head),
        rope=rope_table(config, window, embedding.device, factors),
    )


class Loaded(NamedTuple):
    """A decoder's weights; `quantized` are the same ones as a GGUF file quantized them, where that was wanted and is so."""

    plain: DecoderWeights
    quantized: QuantizedWeights | None = None


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
    files: Checkpoint, window: int, device: torch.device, dtype: torch.dtype
) -> DecoderWeights:
    """Read the weights of a model from whatever files it has."""
    path, config = Path(files.path), files.config
    source: SafetensorsSource | GgufSource
    if files.kind == "gguf":
        source = GgufSource(path, config, device, dtype)
    else:
        source = SafetensorsSource(path, device, dtype)
    with source:
        return assemble(source, config, window)


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
        quantized = assemble_quantized(source, config)
    more: tuple[dict[str, Tensor], dict[str, str]] = ({}, {})
    if quantized is not None:
        more = flatten(quantized)
    cache.write(name, kept.tensors | more[0], more[1])
    return Loaded(plain, quantized)
