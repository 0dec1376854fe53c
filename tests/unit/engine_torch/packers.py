"""Checkpoints as AWQ, GPTQ, FP8 and compressed-tensors publish them, packed number by number, and the plain ones of the same numbers.

Written from how those formats are described and apart from the product: numpy, one loop over the places of a word.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Packed = tuple[dict[str, torch.Tensor], torch.Tensor]
Pack = Callable[[torch.Tensor], Packed]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Form:
    """One way to publish; `exact`: rows in groups of 32 hold the very numbers, None: there are none."""

    table: dict[str, Any]
    pack: Pack
    exact: bool | None = True
    key: str = "quantization_config"


def words(numbers: np.ndarray, bits: int) -> torch.Tensor:
    """Pack along the last dimension, filled up with zeros."""
    run = 32 // bits
    missing = -numbers.shape[1] % run
    filled = np.pad(numbers, ((0, 0), (0, missing))).astype(np.uint32)
    made = np.zeros((filled.shape[0], filled.shape[1] // run), dtype=np.uint32)
    for place in range(run):
        made |= filled[:, place::run] << np.uint32(bits * place)
    return torch.from_numpy(made.view(np.int32).copy())


def awq_words(numbers: np.ndarray) -> torch.Tensor:
    made = np.zeros((numbers.shape[0], numbers.shape[1] // 8), dtype=np.uint32)
    for place, column in enumerate(AWQ_ORDER):
        made |= numbers[:, column::8].astype(np.uint32) << np.uint32(4 * place)
    return torch.from_numpy(made.view(np.int32).copy())


@dataclass(frozen=True)
class Split:
    """A matrix [outputs, inputs] in whole numbers; scale and zero of each row and group, the group of each input."""

    q: np.ndarray
    zero: np.ndarray
    scale: torch.Tensor
    index: np.ndarray

    def floats(self) -> torch.Tensor:
        steps = torch.from_numpy(self.q.astype(np.float32) - self.zero[:, self.index])
        return steps * self.scale.float()[:, torch.from_numpy(self.index)]


def split(
    weight: torch.Tensor,
    bits: int,
    group: int,
    *,
    symmetric: bool,
    shuffled: bool = False,
    dtype: torch.dtype = torch.float16,
) -> Split:
    values, (outputs, inputs), top = weight.numpy(), weight.shape, (1 << bits) - 1
    size = group if group > 0 else inputs
    index = np.arange(inputs) // size
    if shuffled:
        index = np.random.default_rng(inputs).permutation(index)
    groups = index.max() + 1
    scale = torch.zeros(outputs, groups, dtype=dtype)
    zero = np.zeros((outputs, groups), dtype=np.int64)
    q = np.zeros((outputs, inputs), dtype=np.int64)
    for number in range(groups):
        part = values[:, index == number]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if symmetric:
            step = 2 * np.maximum(-low, high) / top
            zero[:, number] = 1 << (bits - 1)
        else:
            step = (high - low) / top
            zero[:, number] = np.clip(np.rint(-low / step), 0, top)
        scale[:, number] = torch.from_numpy(step).to(dtype)
        kept = scale[:, number].float().numpy()
        steps = np.rint(part / kept[:, None]) + zero[:, [number]]
        q[:, index == number] = np.clip(steps, 0, top)
    return Split(q, zero, scale, index)


def awq(group: int) -> Form:
    def pack(weight: torch.Tensor) -> Packed:
        made = split(weight, 4, group, symmetric=False)
        tensors = {
            "qweight": awq_words(made.q.T),
            "qzeros": awq_words(made.zero.T),
            "scales": made.scale.T.contiguous(),
        }
        return tensors, made.floats()

    table = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
    more = {"version": "gemm", "modules_to_not_convert": None, "backend": "autoawq"}
    return Form(table | more, pack, exact=False)


def gptq(
    bits: int, group: int, *, symmetric: bool, second: bool = False, shuffled: bool = False
) -> Form:
    def pack(weight: torch.Tensor) -> Packed:
        made = split(weight, bits, group, symmetric=symmetric, shuffled=shuffled)
        zeros = made.zero if second else (made.zero - 1) % (1 << bits)
        tensors = {
            "qweight": words(made.q, bits).T.contiguous(),
            "qzeros": words(zeros.T, bits),
            "scales": made.scale.T.contiguous(),
            "g_idx": torch.from_numpy(made.index.astype(np.int32)),
        }
        return tensors, made.floats()

    table = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": shuffled,
        "sym": symmetric,
        "checkpoint_format": "gptq_v2" if second else "gptq",
        "damp_percent": 0.1,
        "true_sequential": True,
        "static_groups": False,
        "lm_head": False,
        "meta": {"quantizer": ["gptqmodel:1.0"]},
    }
    exact = None if shuffled or (bits == 8 and not symmetric) else symmetric
    return Form(table, pack, exact)


def e4m3(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize block by block: (float8, scale float32)."""
    outputs, inputs = weight.shape
    tall, wide = block
    made = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn)
    scale = torch.empty(-(-outputs // tall), -(-inputs // wide))
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            place = (
                slice(row * tall, (row + 1) * tall),
                slice(column * wide, (column + 1) * wide),
            )
            scale[row, column] = weight[place].abs().max() / 448
            made[place] = (weight[place] / scale[row, column]).to(torch.float8_e4m3fn)
    return made, scale


def written(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    outputs, inputs = weight.shape
    rows = scale.float().repeat_interleave(block[0], 0)[:outputs]
    return weight.float() * rows.repeat_interleave(block[1], 1)[:, :inputs]


def fp8_block(tall: int, wide: int) -> Form:
    def pack(weight: torch.Tensor) -> Packed:
        made, scale = e4m3(weight, (tall, wide))
        floats = written(made, scale, (tall, wide))
        return {"weight": made, "weight_scale_inv": scale}, floats

    table = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    return Form(table | {"weight_block_size": [tall, wide]}, pack)


def fp8_powers(tall: int, wide: int) -> Form:
    """Scales that are powers of two, kept as such."""

    def pack(weight: torch.Tensor) -> Packed:
        _, scale = e4m3(weight, (tall, wide))
        kept = scale.log2().ceil().exp2().to(torch.float8_e8m0fnu)
        ones = written(torch.ones(weight.shape), kept, (tall, wide))
        made = (weight / ones).to(torch.float8_e4m3fn)
        return {"weight": made, "weight_scale_inv": kept}, written(made, kept, (tall, wide))

    table = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0"}
    return Form(table | {"weight_block_size": [tall, wide]}, pack)


def fp8_tensor() -> Form:
    def pack(weight: torch.Tensor) -> Packed:
        block = (weight.shape[0], weight.shape[1])
        made, scale = e4m3(weight, block)
        tensors = {"weight": made, "weight_scale": scale.reshape(())}
        return tensors | {"input_scale": torch.tensor(0.5)}, written(made, scale, block)

    table = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    return Form(table, pack)


def _compressed(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head", "re:.*mlp\\.gate$"],
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "global_compression_ratio": 1.5,
        "version": "0.9.1",
    }


def ct_floats(strategy: str, dtype: torch.dtype = torch.float32) -> Form:
    def pack(weight: torch.Tensor) -> Packed:
        block = (weight.shape[0] if strategy == "tensor" else 1, weight.shape[1])
        made, scale = e4m3(weight, block)
        scale = scale.to(dtype)
        kept = scale.reshape(1) if strategy == "tensor" else scale
        return {"weight": made, "weight_scale": kept}, written(made, scale, block)

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    return Form(_compressed("float-quantized", weights | {"dynamic": False}), pack)


def ct_packed(
    bits: int,
    group: int,
    *,
    symmetric: bool,
    shuffled: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    zeros: str = "packed",
) -> Form:
    def pack(weight: torch.Tensor) -> Packed:
        made = split(weight, bits, group, symmetric=symmetric, shuffled=shuffled, dtype=dtype)
        tensors = {
            "weight_packed": words(made.q, bits),
            "weight_scale": made.scale,
            "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
        }
        if not symmetric and zeros == "packed":
            tensors["weight_zero_point"] = words(made.zero.T, bits).T.contiguous()
        elif not symmetric:
            signed = made.zero - (1 << (bits - 1))
            tensors["weight_zero_point"] = torch.from_numpy(signed.astype(np.int8))
        if shuffled:
            tensors["weight_g_idx"] = torch.from_numpy(made.index.astype(np.int32))
        return tensors, made.floats()

    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if group > 0 else "channel",
        "group_size": group if group > 0 else None,
        "actorder": "group" if shuffled else None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    exact = None if shuffled or (bits == 8 and not symmetric) else symmetric
    return Form(_compressed("pack-quantized", weights), pack, exact)


def stream(numbers: np.ndarray, bits: int) -> torch.Tensor:
    """Pack each row as one stream of bits, the lowest first."""
    each = (numbers[:, :, None] >> np.arange(bits)) & 1
    rows = each.reshape(len(numbers), -1).astype(np.uint8)
    return torch.from_numpy(np.packbits(rows, axis=1, bitorder="little").view(np.uint32).copy())


def mlx(bits: int, group: int, dtype: torch.dtype) -> Form:
    def pack(weight: torch.Tensor) -> Packed:
        made = split(weight, bits, group, symmetric=False, dtype=dtype)
        bias = (-torch.from_numpy(made.zero) * made.scale.float() * 0.99).to(dtype)
        tensors = {"weight": stream(made.q, bits), "scales": made.scale, "biases": bias}
        index = torch.from_numpy(made.index)
        steps = torch.from_numpy(made.q).float() * made.scale.float()[:, index]
        return tensors, steps + bias.float()[:, index]

    table = {"group_size": group, "bits": bits, "mode": "affine"}
    return Form(table, pack, True if bits <= 4 else None, "quantization")


def ct_integers(strategy: str) -> Form:
    def pack(weight: torch.Tensor) -> Packed:
        scale = weight.abs().amax(1, keepdim=True) / 127
        if strategy == "tensor":
            scale = scale.amax().reshape(1)
        scale = scale.to(torch.bfloat16)
        made = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
        floats = made.float() * scale.float()
        return {"weight": made, "weight_scale": scale}, floats

    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": strategy}
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    table = _compressed("int-quantized", weights | {"dynamic": False})
    table["config_groups"]["group_0"]["input_activations"] = activations
    return Form(table, pack)


FORMS = {
    "awq-32": awq(32),
    "awq-row": awq(-1),
    "gptq-4-sym": gptq(4, 32, symmetric=True),
    "gptq-4-zeros": gptq(4, 32, symmetric=False),
    "gptq-4-v2": gptq(4, -1, symmetric=False, second=True),
    "gptq-4-order": gptq(4, 32, symmetric=True, shuffled=True),
    "gptq-8-sym": gptq(8, 32, symmetric=True),
    "gptq-8-zeros": gptq(8, 32, symmetric=False),
    "fp8-block": fp8_block(40, 48),
    "fp8-powers": fp8_powers(32, 32),
    "fp8-tensor": fp8_tensor(),
    "ct-fp8-tensor": ct_floats("tensor"),
    "ct-fp8-channel": ct_floats("channel", torch.bfloat16),
    "ct-4-sym": ct_packed(4, 32, symmetric=True),
    "ct-4-zeros": ct_packed(4, 32, symmetric=False),
    "ct-4-order": ct_packed(4, 32, symmetric=True, shuffled=True),
    "ct-8-row": ct_packed(8, -1, symmetric=True, dtype=torch.float16),
    "ct-8-zeros": ct_packed(8, 32, symmetric=False, zeros="plain"),
    "ct-int8-channel": ct_integers("channel"),
    "ct-int8-tensor": ct_integers("tensor"),
    **{f"mlx-{bits}": mlx(bits, 32, torch.float16) for bits in (1, 2, 3, 5, 6, 8)},
    "mlx-4": mlx(4, 32, torch.bfloat16),
}


def save_aligned(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write a file whose numbers begin at a multiple of 64 bytes, whatever its header is.

    Weights are mapped from the file, and products of float32 by the same numbers at another alignment differ in their last bits.
    """
    path = folder / "model.safetensors"
    save_file(tensors, path, {"filler": ""})
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    save_file(tensors, path, {"filler": " " * (-(8 + header) % 64)})


def publish(source: Path, form: Form, folder: Path) -> tuple[Path, Path]:
    """Write what `form` makes of a plain checkpoint, and the plain checkpoint of the same numbers."""
    small, plain = folder / "small", folder / "plain"
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        tensors |= load_file(file)
    packed, floats = {}, {}
    for name, tensor in tensors.items():
        floats[name] = tensor
        if tensor.dim() != 2 or not name.endswith("_proj.weight"):
            packed[name] = tensor
            continue
        parts, floats[name] = form.pack(tensor.float())
        packed |= {name.removesuffix("weight") + part: each for part, each in parts.items()}
    table = json.loads((source / "config.json").read_text())
    for path, held, own in (
        (small, packed, {"quantization_config": form.table, form.key: form.table}),
        (plain, floats, {}),
    ):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        save_aligned({name: each.contiguous() for name, each in held.items()}, path)
        (path / "config.json").write_text(json.dumps(table | own))
    return small, plain
