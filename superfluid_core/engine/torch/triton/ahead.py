"""Compiles every kernel for devices that need not be here: proof that they compile, and what a first start would compile.

Owns the list of kernels with the types of their arguments, and the shapes of models that people run. `python -m` this module with
compute capabilities (80 90 100) writes a line per kernel and shape as JSON; ptxas is part of the triton package.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from superfluid_core.engine.torch.attention.base import AttentionShape
from superfluid_core.engine.torch.triton import decode, draw, passes, prefill, products

WARP = 32
SHAPES = {
    "smollm2-135m": AttentionShape(9, 3, 64),
    "qwen3-0.6b": AttentionShape(16, 8, 128),
    "llama3-8b": AttentionShape(32, 8, 128),
    "mistral-7b": AttentionShape(32, 8, 128, sliding_window=4096),
    "qwen2.5-7b": AttentionShape(28, 4, 128),
    "phi-80": AttentionShape(32, 32, 80),
    "gemma3-4b": AttentionShape(8, 4, 256, sliding_window=1024),
}
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with everything that its machine code depends on."""

    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    warps: int = 4

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)


def _typed(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int = 4
) -> Variant:
    """Order the types as the kernel's arguments are; what is named nowhere is a bug of the list."""
    signature = {
        name: "constexpr" if name in constants else types[name] for name in kernel.arg_names
    }
    return Variant(kernel, signature, constants, warps)


def attention_variants(
    shape: AttentionShape, dtype: torch.dtype, block_tokens: int = 16, splits: int = 8
) -> Iterator[Variant]:
    """List the kernels of attention for one shape of heads."""
    kind, pad = "*" + NAMES[dtype], max(16, triton.next_power_of_2(shape.head_dim))
    sizes = {
        "KV_HEADS": shape.kv_heads,
        "GROUP": shape.group,
        "HEAD_DIM": shape.head_dim,
        "HEAD_PAD": pad,
        "BLOCK_TOKENS": block_tokens,
        "PRECISION": decode.precision_of(dtype),
    }
    plain = {"scale": "fp32", "soft_cap": "fp32", "window": "i32"}
    strides = {"query_stride": "i64", "table_stride": "i64"}
    pool = {"queries": kind, "keys": kind, "values": kind, "out": kind, "tables": "*i32"}
    partial = {"partial": "*fp32", "partial_best": "*fp32", "partial_weight": "*fp32"}
    group_pad = max(decode.DOT_ROWS_MIN, triton.next_power_of_2(shape.group))
    yield _typed(
        decode.split_kernel,
        {**pool, **partial, **plain, **strides, "positions": "*i64"},
        {
            **sizes,
            "GROUP_PAD": group_pad,
            "TILE": decode.keys_of_tile(pad, dtype.itemsize),
            "SPLITS": splits,
        },
    )
    yield _typed(
        decode.join_kernel,
        {**partial, "out": kind},
        {"HEAD_DIM": shape.head_dim, "HEAD_PAD": pad, "SPLITS": splits},
    )
    work = dict.fromkeys(("rows", "firsts", "starts", "lengths", "contexts"), "*i32")
    yield _typed(
        prefill.prefill_kernel,
        {**pool, **plain, **strides, **work},
        {
            **sizes,
            "ROWS": prefill.tile_rows(shape.group),
            "TILE": prefill.keys_of_tile(pad, dtype.itemsize),
        },
        warps=4 if shape.head_dim <= 64 else 8,
    )


def pass_variants(shape: AttentionShape, dtype: torch.dtype) -> Iterator[Variant]:
    """List the small passes and the draw."""
    kind = "*" + NAMES[dtype]
    heads = shape.heads + 2 * shape.kv_heads
    yield _typed(
        passes.turn_store_kernel,
        {
            **dict.fromkeys(("qkv", "queries", "keys", "values"), kind),
            "cos": "*fp32",
            "sin": "*fp32",
            "slots": "*i64",
        },
        {
            "HEADS": shape.heads,
            "KV_HEADS": shape.kv_heads,
            "HEAD_DIM": shape.head_dim,
            "HALF_PAD": triton.next_power_of_2(shape.head_dim // 2),
            "HEADS_PAD": triton.next_power_of_2(heads),
            "TURNS": True,
        },
    )
    width = shape.kv_heads * shape.head_dim
    moved = dict.fromkeys(("from_keys", "from_values", "keys", "values"), kind)
    yield _typed(
        passes.store_kernel,
        {**moved, "slots": "*i64", "key_stride": "i64", "value_stride": "i64"},
        {"WIDTH": width, "WIDTH_PAD": triton.next_power_of_2(width)},
    )
    hidden = shape.heads * shape.head_dim
    yield _typed(
        passes.add_norm_kernel,
        {**dict.fromkeys(("rows", "added", "weight", "out"), kind), "width": "i32", "eps": "fp32"},
        {"HAS_ADDED": True, "WIDTH_PAD": triton.next_power_of_2(hidden)},
        warps=4 if hidden <= 2048 else 8,
    )
    yield _typed(
        passes.silu_mul_kernel,
        {"gate_up": kind, "out": kind, "width": "i32"},
        {"COLUMNS": passes.SILU_COLUMNS},
    )
    filters = {"min_p": "*fp64", "top_p": "*fp64", "uniform": "*fp64", "top_k": "*i64"}
    yield _typed(
        draw.draw_open_kernel,
        {**filters, "rows": "*fp32", "settled": "*i1", "found": "*i64", "width": "i32"},
        {"TILE": draw.TILE},
        warps=draw.WARPS,
    )


KINDS = {"int4": ("*fp16", "*fp16"), "int8": ("*fp16", "*fp16"), "fp8": ("*fp32", "*fp32")}


def product_variants(dtype: torch.dtype) -> Iterator[Variant]:
    """List the products of quantized matrices: they depend on the dtype of rows, not on the shape of a model."""
    kind = "*" + NAMES[dtype]
    sizes = ("rows", "outputs", "inputs", "groups", "scale_groups", "splits")
    plain = {**dict.fromkeys((*sizes, "first_output", "count"), "i32"), "out_stride": "i64"}
    tensors = {**dict.fromkeys(("x", "bias", "out", "room"), kind), "partial": "*fp32", "q": "*u8"}
    for name, (scale, minimum) in KINDS.items():
        types = {**plain, **tensors, "scale": scale, "minimum": minimum}
        tile = {"OUTPUTS": products.TILE_OUTPUTS, "GROUPS": products.TILE_GROUPS, "KIND": name}
        for rows in products.ROW_CLASSES:
            own = {"ROWS": rows, "IS_SPLIT": rows < products.ROW_CLASSES[-1], "HAS_BIAS": True}
            yield _typed(
                products.product_kernel,
                types,
                {**tile, **own, "PRECISION": decode.precision_of(dtype)},
            )
        yield _typed(products.dequantize_kernel, types, tile)
    yield _typed(
        products.sum_splits_kernel,
        {**plain, **tensors},
        {"COLUMNS": products.SUM_COLUMNS, "HAS_BIAS": True},
    )


def variants(shape: AttentionShape, dtype: torch.dtype) -> list[Variant]:
    """Every kernel that a model of this shape launches."""
    return [*attention_variants(shape, dtype), *pass_variants(shape, dtype)]


def compile_for(variant: Variant, capability: int) -> dict[str, int]:
    """Compile down to machine code; its size, shared memory and spilled registers. Raises what the compiler raises."""
    # torch's memory is aligned, and a launch tells the compiler so
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, kind in enumerate(variant.types.values())
        if kind.startswith("*")
    }
    source = ASTSource(variant.kernel, variant.types, variant.constants, aligned)
    made = triton.compile(
        source,
        target=GPUTarget("cuda", capability, WARP),
        options={"num_warps": variant.warps},
    )
    return {"bytes": len(made.asm["cubin"]), "shared": int(made.metadata.shared)}


@click.command()
@click.argument("capabilities", nargs=-1, type=int, required=True)
@click.option("--shape", "names", multiple=True, default=tuple(SHAPES), show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
def main(capabilities: Sequence[int], names: Sequence[str], dtype: str) -> None:
    """Compile all kernels for CAPABILITIES such as 80 90 100."""
    kind = getattr(torch, dtype)
    listed = {name: variants(SHAPES[name], kind) for name in names}
    for name, each in {**listed, "any": list(product_variants(kind))}.items():
        for variant in each:
            for capability in capabilities:
                found = compile_for(variant, capability)
                line = {"kernel": variant.name, "shape": name, "capability": capability, **found}
                sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
