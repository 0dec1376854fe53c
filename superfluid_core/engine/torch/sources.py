"""Where a checkpoint keeps the tensors that an engine asks for, and in which order their rows come out.

Owns names. Engines ask by the Hugging Face name that a Llama would have; files of other families keep some of them fused (Phi-3),
under a prefix (models that also see), or by expert in one block (GGUF). Rows of queries and keys come out so that number j of a
head turns together with j + head_dim / 2: GGUF files of some families keep such pairs side by side, and where only a part of a
head turns, what does not is spread behind both halves of what does. Nothing that can execute is ever read.

    safetensors  one file or many, memory-mapped by the library, straight to device and dtype
    GGUF         dequantized tensor by tensor, only the rows that are asked for
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from superfluid_core.engine.torch.dequant import dequantize
from superfluid_core.engine.torch.quantized import QuantizedRows, read_rows
from superfluid_core.errors import ModelFilesError
from superfluid_core.modelfiles.config import ModelConfig
from superfluid_core.modelfiles.gguf import GgufFile, GgufTensor
from superfluid_core.modelfiles.safetensors import SafetensorsIndex
from superfluid_core.modelfiles.shape import INTERLEAVED


class Entry(NamedTuple):
    """What a file says of a tensor that an engine asks for: under which name, of which type and shape its rows lie there.

    `beside` are the tensors that belong to it, such as scales.
    """

    stored: str
    type: str
    shape: tuple[int, ...]
    beside: tuple[str, ...] = ()


class WeightSource(Protocol):
    """Tensors by their Hugging Face name, on the wanted device, in the wanted dtype."""

    def has(self, name: str) -> bool: ...

    def get(self, name: str) -> Tensor: ...


class Part(NamedTuple):
    """Rows [first, end) of a tensor that a file has."""

    name: str
    first: int
    end: int


def fused_part(name: str, config: ModelConfig) -> Part | None:
    """Find where the rows of a projection lie if a file fuses it with its neighbours."""
    prefix, _, rest = name.rpartition(".self_attn.")
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    places = {"q_proj": (0, q), "k_proj": (q, q + kv), "v_proj": (q + kv, q + 2 * kv)}
    whole = f"{prefix}.self_attn.qkv_proj"
    if not prefix:
        prefix, _, rest = name.rpartition(".mlp.")
        wide = config.intermediate
        places = {"gate_proj": (0, wide), "up_proj": (wide, 2 * wide)}
        whole = f"{prefix}.mlp.gate_up_proj"
    projection, _, kind = rest.partition(".")
    if projection not in places:
        return None
    return Part(f"{whole}.{kind}", *places[projection])


def uninterleave(rows: Tensor, heads: int) -> Tensor:
    """Rows of pairs (0, 1), (2, 3) ... of each head -> first halves, then second halves."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def spread(rows: Tensor, heads: int, turned: int) -> Tensor:
    """Put half of what does not turn of each head behind the first half of what does."""
    each = rows.reshape(heads, -1, *rows.shape[1:])
    half, still = turned // 2, (each.shape[1] - turned) // 2
    low, high, rest, more = torch.split(each, [half, half, still, still], dim=1)
    return torch.cat((low, rest, high, more), dim=1).reshape(rows.shape)


class _Order:
    """The order in which rows of queries and keys come out."""

    def __init__(self, config: ModelConfig, *, is_interleaved: bool) -> None:
        self._config = config
        self._is_interleaved = is_interleaved

    def changes(self, name: str) -> bool:
        is_turned = ".q_proj." in name or ".k_proj." in name
        return is_turned and (self._is_interleaved or self._config.rotary_dim > 0)

    def __call__(self, name: str, rows: Tensor) -> Tensor:
        if not self.changes(name):
            return rows
        config = self._config
        heads = config.heads if ".q_proj." in name else config.kv_heads
        if self._is_interleaved:
            return uninterleave(rows, heads)
        return spread(rows, heads, config.turned)


def is_wide(name: str, config: ModelConfig) -> bool:
    """Whether a tensor stays float32: norms of families that multiply before they round."""
    return config.norms == "around" and name.endswith("norm.weight")


# --- safetensors

_PREFIXES = ("language_model.model.", "model.language_model.")


class Closing(ABC):
    """What is closed at the end of a `with`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_cause: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None: ...


class SafetensorsSource(Closing):
    """A directory of safetensors; files are opened when first needed and closed together."""

    def __init__(
        self, directory: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.index = SafetensorsIndex.open(directory)
        self._names = frozenset(self.index.names())
        self._config, self._device, self._dtype = config, device, dtype
        self.order = _Order(config, is_interleaved=False)
        self._prefix = next(
            (each for each in _PREFIXES if f"{each}norm.weight" in self._names), "model."
        )
        self._files: dict[Path, Any] = {}
        self._stack = ExitStack()

    def close(self) -> None:
        self._files.clear()
        self._stack.close()

    def has(self, name: str) -> bool:
        return self.find(name) is not None

    def get(self, name: str) -> Tensor:
        found = self.find(name)
        if found is None:
            raise ModelFilesError(f"the checkpoint has no tensor {name!r}")
        tensor = self.read(*found)
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise ModelFilesError(f"tensor {name!r} is of type {tensor.dtype}, not a plain float")
        if is_wide(name, self._config):
            return tensor.float() + 1.0  # these families keep what their norms add to one
        return self.order(name, tensor.to(self._dtype))

    def read(self, stored: str, part: Part | None = None) -> Tensor:
        """Read a tensor, or some rows of it, by its name in the file and as it lies there."""
        path = Path(self.index.locate(stored)[0])
        try:
            file = self._files.get(path)
            if file is None:
                file = self._stack.enter_context(
                    safe_open(path, framework="pt", device=str(self._device))
                )
                self._files[path] = file
            tensor: Tensor = (
                file.get_tensor(stored)
                if part is None
                else file.get_slice(stored)[part.first : part.end]
            )
        except (SafetensorError, OSError) as error:
            raise ModelFilesError(f"{path.name}: {error}") from error
        return tensor

    def entry(self, name: str) -> Entry | None:
        """Say where a tensor lies, and as what, without reading it."""
        found = self.find(name)
        if found is None:
            return None
        stored, part = found
        place = self.index.locate(stored)
        rows = place.shape if part is None else (part.end - part.first, *place.shape[1:])
        return Entry(stored, place.dtype, rows)

    def find(self, name: str) -> tuple[str, Part | None] | None:
        """Find a tensor's name in the file, and which of its rows are meant where it is fused."""
        if (stored := self._stored(name)) in self._names:
            return stored, None
        part = fused_part(name, self._config)
        if part is not None and (stored := self._stored(part.name)) in self._names:
            return stored, part
        return None

    def _stored(self, name: str) -> str:
        if name.startswith("model."):
            return self._prefix + name.removeprefix("model.")
        return name


# --- GGUF

_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
_GGUF_MORE_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GGUF_EXPERTS = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
}
_GGUF_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "rope_freqs": "rope_freqs.weight",
    "rope_factors_long": "rope_factors_long.weight",
    "rope_factors_short": "rope_factors_short.weight",
}


def gguf_name(name: str, norms: str = "before") -> str:
    """Translate the Hugging Face name of a tensor of a family that norms so."""
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    if part.startswith("mlp.experts."):
        return f"blk.{layer}.{_GGUF_EXPERTS[part.rsplit('.', 1)[1]]}.{kind}"
    parts = _GGUF_LAYER if norms == "before" else _GGUF_LAYER | _GGUF_MORE_NORMS
    return f"blk.{layer}.{parts[part]}.{kind}"


class GgufSource(Closing):
    """A GGUF file, dequantized tensor by tensor."""

    def __init__(
        self, path: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._file = GgufFile.open(path)
        family = self._file.metadata.get("general.architecture")
        self._order = _Order(config, is_interleaved=family in INTERLEAVED)
        self._config, self._device, self._dtype = config, device, dtype

    def close(self) -> None:
        self._file.close()

    def has(self, name: str) -> bool:
        return self._find(name) is not None

    def get(self, name: str) -> Tensor:
        found = self._find(name)
        if found is None:
            known = gguf_name(name, self._config.norms)
            raise ModelFilesError(f"the GGUF file has no tensor {known!r}")
        entry, data, shape = found
        dtype = torch.float32 if is_wide(name, self._config) else self._dtype
        tensor = dequantize(data, entry.type, shape, dtype)
        return self._order(name, tensor).to(self._device)

    def entry(self, name: str) -> Entry | None:
        """Say where a tensor lies, and as what, without reading it."""
        found = self._find(name)
        return None if found is None else Entry(found[0].name, found[0].type.name, found[2])

    def rows(self, name: str) -> QuantizedRows | None:
        """Find a matrix as the file quantized it; None where it holds plain numbers."""
        found = self._find(name)
        if found is None:
            return None
        entry, data, shape = found
        rows = read_rows(data, entry.type, shape)
        if rows is None or not self._order.changes(name):
            return rows
        return rows.reordered(lambda each: self._order(name, each))

    def _find(self, name: str) -> tuple[GgufTensor, memoryview, tuple[int, ...]] | None:
        """Find a tensor or some rows of one: its entry, their bytes, their shape."""
        tensors, norms = self._file.tensors, self._config.norms
        entry = tensors.get(gguf_name(name, norms))
        if ".mlp.experts." in name:
            return None if entry is None else self._expert(entry, int(name.split(".")[5]))
        part = fused_part(name, self._config)
        whole = None if part is None else tensors.get(gguf_name(part.name, norms))
        # a fused gate and up has the name of up alone: there is no gate beside it then
        is_fused = entry is None or (
            entry is whole and gguf_name(name.replace("up_proj", "gate_proj"), norms) not in tensors
        )
        if part is None or whole is None or not is_fused:
            return None if entry is None else (entry, self._file.data(entry), entry.shape)
        return self._rows_of(whole, part.first, part.end, whole.shape[1:])

    def _expert(
        self, entry: GgufTensor, number: int
    ) -> tuple[GgufTensor, memoryview, tuple[int, ...]] | None:
        if len(entry.shape) != 3 or number >= entry.shape[0]:
            return None
        return self._rows_of(entry, number, number + 1, entry.shape[2:], entry.shape[1])

    def _rows_of(
        self, entry: GgufTensor, first: int, end: int, inner: tuple[int, ...], each: int = 1
    ) -> tuple[GgufTensor, memoryview, tuple[int, ...]] | None:
        """Rows [first, end) of the outermost dimension, each of which is `each` rows of a matrix."""
        if end > entry.shape[0]:
            return None
        size = entry.bytes // entry.shape[0]
        data = self._file.data(entry)[first * size : end * size]
        return entry, data, ((end - first) * each, *inner)
