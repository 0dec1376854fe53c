"""`quantization_config` of a Hugging Face model -> `Quantization`: how its weights were made small before they were published.

Owns the methods that are read (AWQ, GPTQ, FP8, compressed-tensors, and MLX's own, which says it under `quantization`), what each of
their keys means here, and the refusal of all else.
It must not know tensors' numbers. The idea: a key that no table here knows may change what the numbers mean, so it is refused by name
unless it says nothing. Which matrices are quantized the tensors themselves say, by their names and types; lists of exceptions are
checked to be lists and never matched, so no pattern of a stranger's is run. What is said of activations is read past: they stay as
`--dtype` has them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

from superfluid_core.errors import ModelFilesError
from superfluid_core.modelfiles.values import Fields

Layout = Literal["awq", "gptq", "packed", "int8", "fp8", "mlx"]
SUPPORTED = (
    "awq (gemm, 4 bits), gptq (4 or 8 bits), fp8 (e4m3), "
    "compressed-tensors (float-quantized; int-quantized; pack-quantized of 4 or 8 bits), mlx"
)
GROUP_MAX = 1 << 20
# of each layout: the tensor that holds a matrix, after the name of its module, and those that belong to it
MATRIX: dict[Layout, str] = {
    "awq": "qweight",
    "gptq": "qweight",
    "packed": "weight_packed",
    "int8": "weight",
    "fp8": "weight",
    "mlx": "weight",
}
BESIDE: dict[Layout, tuple[str, ...]] = {
    "awq": ("scales", "qzeros"),
    "gptq": ("scales", "qzeros", "g_idx"),
    "packed": ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
    "int8": ("weight_scale", "weight_zero_point"),
    "fp8": ("weight_scale_inv", "weight_scale"),
    "mlx": ("scales", "biases"),
}
INT8_TYPE, FP8_TYPE, MLX_TYPE = "I8", "F8_E4M3", "U32"
# layouts whose matrices have the name that plain ones have: the type tells
WORD_TYPES: dict[Layout, str] = {"int8": INT8_TYPE, "fp8": FP8_TYPE, "mlx": MLX_TYPE}


class Width(NamedTuple):
    """How MLX packed a matrix. `mode`: affine (a scale and a bias for each group), or floats of 4 or 8 bits under small scales."""

    bits: int
    group: int
    mode: str


@dataclass(frozen=True, slots=True)
class Quantization:
    """How matrices are kept.

    layout        which tensors a matrix is made of
    group         inputs that share a scale; 0 where a whole row does, or where the scales' own shape tells
    block         rows and columns of a block of 8-bit floats; None where the scales' own shape tells
    zero_points   whether each group has a zero of its own
    zeros_less_1  zeros are kept as one less (the first form of GPTQ)
    by_activation inputs were put into groups in another order than they lie in
    mode          MLX alone: see Width
    own           MLX alone: modules that are packed otherwise, in the order of their names
    """

    method: str
    layout: Layout
    bits: int
    group: int = 0
    block: tuple[int, int] | None = None
    zero_points: bool = False
    zeros_less_1: bool = False
    by_activation: bool = False
    mode: str = ""
    own: tuple[tuple[str, Width], ...] = ()

    def width(self, module: str) -> Width:
        """Say how the matrix of a module was packed; what is no exception is as the file says of all."""
        place = bisect_left(self.own, module, key=lambda each: each[0])
        if place < len(self.own) and self.own[place][0] == module:
            return self.own[place][1]
        return Width(self.bits, self.group, self.mode)


def quantization_of(config: Mapping[str, object]) -> Quantization | None:
    """Read what `config.json` says of it, None for plain weights. Raises ModelFilesError for what would be read wrongly."""
    fields = Fields(config, "config.json")
    own = fields.mapping("quantization")
    if own:  # what MLX writes it also writes under `quantization_config`, in the same words
        return _mlx(_Said("mlx", own))
    key = "quantization_config" if fields.has("quantization_config") else "compression_config"
    table = fields.mapping(key)
    if not table:
        return None
    found = Fields(table, key)
    method = found.text("quant_method", "" if key != "compression_config" else "compressed-tensors")
    read = _METHODS.get(method)
    if read is None:
        shown = repr(method[:40]) if method else "by a method that is not named"
        raise ModelFilesError(f"these safetensors are quantized ({shown}); read are {SUPPORTED}")
    return read(_Said(method, table))


def _keys(names: str) -> frozenset[str]:
    return frozenset(names.split())


class _Said(Fields):
    """What a file says of one method, with refusals that name it."""

    def __init__(self, method: str, table: Mapping[str, object], place: str = "") -> None:
        super().__init__(table, f"quantization {method}{place}")
        self.method, self.table, self._where = method, table, place

    def inside(self, place: str, table: Mapping[str, object]) -> _Said:
        """Go into a table of this one."""
        return _Said(self.method, table, f"{self._where}, {place}")

    def refusal(self, what: str) -> ModelFilesError:
        return ModelFilesError(
            f"these safetensors are quantized ({self.method}{self._where}): {what} is not supported; "
            f"read are {SUPPORTED}"
        )

    def only(self, known: frozenset[str]) -> None:
        """Refuse a key that nobody here knows, unless it says nothing."""
        for key, value in self.table.items():
            if key not in known and value not in (None, False, "", [], {}):
                raise self.refusal(f"the key {key[:40]!r}")

    def one_of(self, key: str, default: str, known: tuple[str, ...]) -> str:
        value = self.text(key, default)
        if value not in known:
            raise self.refusal(f"{key} {value[:40]!r}")
        return value

    def bits(self, key: str, known: tuple[int, ...]) -> int:
        value = self.integer(key)
        if value not in known:
            raise self.refusal(f"a width of {value} bits")
        return value

    def group(self, key: str) -> int:
        """Read how many inputs share a scale; 0 is all of a row."""
        value = self.integer(key, -1, at_least=-1, at_most=GROUP_MAX)
        if value == 0:
            raise self.refusal(f"{key} 0")
        return max(value, 0)

    def off(self, *keys: str) -> None:
        """Refuse what changes the numbers, where it is on."""
        for key in keys:
            if self.table.get(key) not in (None, False, "", [], {}):
                raise self.refusal(key)


# --- AWQ

_AWQ_KEYS = _keys(
    "quant_method bits w_bit group_size q_group_size zero_point version modules_to_not_convert backend "
    "do_fuse modules_to_fuse fuse_max_seq_len exllama_config model_seqlen use_exllama"
)
_AWQ_GROUPS = (0, 32, 64, 128)


def _awq(said: _Said) -> Quantization:
    said.only(_AWQ_KEYS)
    version = said.text("version", "gemm").lower()
    if version != "gemm":
        raise said.refusal(f"version {version[:40]!r}")
    said.texts("modules_to_not_convert")
    group = said.group("group_size" if said.has("group_size") else "q_group_size")
    if group not in _AWQ_GROUPS:
        raise said.refusal(f"groups of {group}")
    return Quantization(
        method=said.method,
        layout="awq",
        bits=said.bits("bits" if said.has("bits") else "w_bit", (4,)),
        group=group,
        zero_points=said.truth("zero_point", True),
    )


# --- GPTQ

_GPTQ_KEYS = _keys(
    # what decides about numbers
    "quant_method bits group_size desc_act sym checkpoint_format format pack_dtype dynamic is_marlin_format "
    # how it was made, and how others run it
    "damp_percent damp_auto_increment static_groups true_sequential mse model_name_or_path model_file_base_name "
    "meta lm_head dataset tokenizer batch_size block_name_to_quantize cache_block_outputs exllama_config "
    "max_input_length model_seqlen module_name_preceding_first_block modules_in_block_to_quantize pad_token_id "
    "use_cuda_fp16 use_exllama disable_exllama backend modules_to_not_convert hyb_act act_group_aware "
    "parallel_packing offload_to_disk"
)


def _gptq(said: _Said) -> Quantization:
    said.only(_GPTQ_KEYS)
    said.off("is_marlin_format")
    key = "checkpoint_format" if said.has("checkpoint_format") else "format"
    form = said.one_of(key, "gptq", ("gptq", "gptq_v2"))
    said.one_of("pack_dtype", "int32", ("int32",))
    # entries of `dynamic` begin with "-:" where they except modules; others give a module its own width
    own = [name for name in said.mapping("dynamic") if not name.startswith("-:")]
    if own:
        raise said.refusal(f"a width of its own for {own[0][:60]!r}")
    return Quantization(
        method=said.method,
        layout="gptq",
        bits=said.bits("bits", (4, 8)),
        group=said.group("group_size"),
        zero_points=not said.truth("sym", True),
        zeros_less_1=form == "gptq",
        by_activation=said.truth("desc_act", False),
    )


# --- FP8

_FP8_KEYS = _keys(
    "quant_method fmt activation_scheme weight_block_size modules_to_not_convert ignored_layers scale_fmt "
    "kv_cache_scheme dequantize"
)


def _fp8(said: _Said) -> Quantization:
    said.only(_FP8_KEYS)
    said.one_of("fmt", "e4m3", ("e4m3", "float8_e4m3fn"))
    said.one_of("activation_scheme", "dynamic", ("dynamic", "static"))
    said.one_of("scale_fmt", "float", ("float", "ue8m0"))
    for key in ("modules_to_not_convert", "ignored_layers"):
        said.texts(key)
    block = _block(said, "weight_block_size")
    return Quantization(method=said.method, layout="fp8", bits=8, block=block)


def _block(said: _Said, key: str) -> tuple[int, int] | None:
    if not said.has(key):
        return None
    sizes = said.numbers(key)
    if len(sizes) != 2 or not all(size == int(size) and 0 < size <= GROUP_MAX for size in sizes):
        raise said.refusal(f"{key} {str(sizes)[:40]}")
    return int(sizes[0]), int(sizes[1])


# --- compressed-tensors

_PACKED_KEYS = _keys(
    "quant_method format config_groups ignore quantization_status global_compression_ratio kv_cache_scheme "
    "sparsity_config transform_config version"
)
_SCHEME_KEYS = _keys("targets weights input_activations output_activations format")
_WEIGHTS_KEYS = _keys(
    "num_bits type symmetric strategy group_size block_structure dynamic actorder observer observer_kwargs "
    "scale_dtype zp_dtype"
)


def _compressed(said: _Said) -> Quantization:
    said.only(_PACKED_KEYS)
    said.off("transform_config")
    said.one_of("quantization_status", "compressed", ("compressed", "frozen"))
    sparsity = said.mapping("sparsity_config")
    if sparsity:
        said.inside("sparsity_config", sparsity).one_of("format", "dense", ("dense",))
    said.texts("ignore")
    form = said.one_of("format", "", ("float-quantized", "int-quantized", "pack-quantized"))
    schemes = said.mapping("config_groups")
    if not schemes:
        raise said.refusal("no config_groups")
    found = {_scheme(said, name, scheme, form) for name, scheme in schemes.items()}
    if len(found) > 1:
        raise said.refusal("config_groups that differ in their weights")
    return found.pop()


def _scheme(said: _Said, name: str, scheme: object, form: str) -> Quantization:
    if not isinstance(scheme, dict):
        raise said.refusal(f"config_groups that are {str(scheme)[:40]!r}")
    group = said.inside(name[:40], scheme)
    group.only(_SCHEME_KEYS)
    group.one_of("format", form, (form,))
    weights = group.inside("weights", group.mapping("weights"))
    weights.only(_WEIGHTS_KEYS)
    weights.off("dynamic")
    if form == "float-quantized":
        return _scheme_of_floats(weights)
    weights.one_of("type", "int", ("int",))
    if form == "int-quantized":
        return _scheme_of_bytes(weights)
    strategy = weights.one_of("strategy", "group", ("group", "channel"))
    size = weights.group("group_size") if strategy == "group" else 0
    if strategy == "group" and not size:
        raise weights.refusal("the strategy 'group' without a group_size")
    order = weights.text("actorder", "") if weights.is_text("actorder") else ""
    if order not in ("", "group", "weight", "static") or weights.has("actorder") != bool(order):
        raise weights.refusal(f"actorder {order[:40]!r}")
    return Quantization(
        method=said.method,
        layout="packed",
        bits=weights.bits("num_bits", (4, 8)),
        group=size,
        zero_points=not weights.truth("symmetric", True),
        by_activation=order == "group",
    )


def _scheme_of_bytes(weights: _Said) -> Quantization:
    """Read what is said of int8 that are kept as they are, mostly beside activations of 8 bits."""
    weights.one_of("strategy", "tensor", ("tensor", "channel"))
    weights.off("actorder")
    return Quantization(
        method=weights.method,
        layout="int8",
        bits=weights.bits("num_bits", (8,)),
        zero_points=not weights.truth("symmetric", True),
    )


def _scheme_of_floats(weights: _Said) -> Quantization:
    weights.one_of("type", "float", ("float",))
    strategy = weights.one_of("strategy", "tensor", ("tensor", "channel", "block"))
    if not weights.truth("symmetric", True):
        raise weights.refusal("zero points of 8-bit floats")
    block = _block(weights, "block_structure") if strategy == "block" else None
    if (strategy == "block") != (block is not None):
        raise weights.refusal("the strategy 'block' without a block_structure")
    bits = weights.bits("num_bits", (8,))
    return Quantization(method=weights.method, layout="fp8", bits=bits, block=block)


# --- MLX

# bits of each mode, and the groups that it has
_MLX_MODES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "affine": ((1, 2, 3, 4, 5, 6, 8), (32, 64, 128)),
    "mxfp4": ((4,), (32,)),
    "mxfp8": ((8,), (32,)),
    "nvfp4": ((4,), (16,)),
}
_MLX_KEYS = _keys("group_size bits mode")


def _mlx(said: _Said) -> Quantization:
    """Read MLX's table: what holds for all, and under the names of modules what holds for them; false leaves one plain."""
    table = said.table
    everywhere = _mlx_width(said)
    own = []
    for name, value in table.items():
        if name in _MLX_KEYS or isinstance(value, bool):
            continue
        if not isinstance(value, dict):
            raise said.refusal(f"the key {name[:40]!r}")
        inside = said.inside(name[:80], value)
        inside.only(_MLX_KEYS)
        own.append((name, _mlx_width(inside)))
    return Quantization(
        method=said.method,
        layout="mlx",
        bits=everywhere.bits,
        group=everywhere.group,
        mode=everywhere.mode,
        own=tuple(sorted(own)),
    )


def _mlx_width(said: _Said) -> Width:
    mode = said.one_of("mode", "affine", tuple(_MLX_MODES))
    bits, groups = _MLX_MODES[mode]
    group = said.group("group_size")
    if group not in groups:
        raise said.refusal(f"groups of {group} (mode {mode})")
    return Width(said.bits("bits", bits), group, mode)


_METHODS = {"awq": _awq, "gptq": _gptq, "fp8": _fp8, "compressed-tensors": _compressed}


# --- what tensors count for


def holds_matrix(kept: Quantization, name: str, kind: str) -> bool:
    """Whether a tensor of a file holds a quantized matrix."""
    if name.rpartition(".")[2] != MATRIX[kept.layout]:
        return False
    return kind == WORD_TYPES.get(kept.layout, kind)


def numbers_in(kept: Quantization | None, name: str, kind: str, shape: tuple[int, ...]) -> int:
    """Count the model's own numbers in a tensor: several to a word where they are packed, none in what belongs to them."""
    if kept is None:
        return prod(shape)
    if holds_matrix(kept, name, kind):
        if kept.layout == "mlx":
            return prod(shape) * 32 // kept.width(name.rpartition(".")[0]).bits
        return prod(shape) * (1 if kept.layout in ("int8", "fp8") else 32 // kept.bits)
    is_beside = name.rpartition(".")[2] in (*BESIDE[kept.layout], "input_scale")
    return 0 if is_beside else prod(shape)
