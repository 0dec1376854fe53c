"""The structures that ops.cpp and Python share, field by field as the sources declare them.

Addresses are plain numbers: whoever fills a structure keeps the tensors that they point into. Nothing here computes.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

from torch import Tensor


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's first element lies; None stands for null."""
    return None if tensor is None else tensor.data_ptr()


class Heads(ctypes.Structure):
    """Heads of a model and the pool's block size; `sliding_window` 0 is none."""

    _fields_ = (
        ("query", c_int32),
        ("key", c_int32),
        ("size", c_int32),
        ("block_tokens", c_int32),
        ("sliding_window", c_int32),
        ("norm_eps", c_float),
    )


class Turn(ctypes.Structure):
    """Turning queries and keys of fused rows, and keeping keys and values."""

    _fields_ = (
        ("qkv", c_void_p),
        ("norm", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("slots", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("rows", c_int32),
        ("threads", c_int32),
    )


class Attend(ctypes.Structure):
    """Attention of fused rows over their lanes' blocks."""

    _fields_ = (
        ("qkv", c_void_p),
        ("out", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("blocks", c_void_p),
        ("lane_of", c_void_p),
        ("positions", c_void_p),
        ("rows", c_int32),
        ("blocks_width", c_int32),
        ("threads", c_int32),
        ("unused", c_int32),
    )


class Matrix(ctypes.Structure):
    """A quantized matrix in tiles."""

    _fields_ = (
        ("tiles", c_void_p),
        ("bias", c_void_p),
        ("kind", c_int32),
        ("outputs", c_int32),
        ("inputs", c_int32),
        ("unused", c_int32),
    )


class Rows(ctypes.Structure):
    """Room for quantized activations, `room` rows of every group side by side."""

    _fields_ = (
        ("values", c_void_p),
        ("scales", c_void_p),
        ("sums", c_void_p),
        ("counts", c_void_p),
        ("room", c_int64),
    )


class Many(ctypes.Structure):
    """Many float rows for a product with a quantized matrix, and the room to quantize them in."""

    _fields_ = (
        ("x", c_void_p),
        ("out", c_void_p),
        ("rows", Rows),
        ("count", c_int32),
        ("gated", c_int32),
        ("threads", c_int32),
        ("unused", c_int32),
    )


class Layer(ctypes.Structure):
    """One layer of a quantized model."""

    _fields_ = (
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("head_norm", c_void_p),
        ("qkv", Matrix),
        ("out", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("keys", c_void_p),
        ("values", c_void_p),
    )


class Model(ctypes.Structure):
    """A quantized model and its pool."""

    _fields_ = (
        ("heads", Heads),
        ("hidden", c_int32),
        ("intermediate", c_int32),
        ("vocabulary", c_int32),
        ("layers", c_int32),
        ("kv_is_float", c_int32),
        ("embedding_is_float", c_int32),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("head", Matrix),
        ("layer", ctypes.POINTER(Layer)),
    )


class Step(ctypes.Structure):
    """One step: what is fed, and the room that it needs."""

    _fields_ = (
        ("ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("sampled", c_void_p),
        ("blocks", c_void_p),
        ("lane_of", c_void_p),
        ("tokens", c_int32),
        ("samples", c_int32),
        ("blocks_width", c_int32),
        ("threads", c_int32),
        ("spans", c_int32),
        ("unused", c_int32),
        ("x", c_void_p),
        ("qkv", c_void_p),
        ("mixed", c_void_p),
        ("wide", c_void_p),
        ("weighted", c_void_p),
        ("best", c_void_p),
        ("total", c_void_p),
        ("rows", Rows),
        ("phases", c_void_p),
        ("logits", c_void_p),
    )


class Large(ctypes.Structure):
    """One step of many rows: what is fed, and the room that it needs."""

    _fields_ = (
        ("ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("sampled", c_void_p),
        ("blocks", c_void_p),
        ("parts", c_void_p),
        ("tokens", c_int32),
        ("samples", c_int32),
        ("blocks_width", c_int32),
        ("threads", c_int32),
        ("parts_count", c_int32),
        ("unused", c_int32),
        ("panel_values", c_int64),
        ("x", c_void_p),
        ("qkv", c_void_p),
        ("normed", c_void_p),
        ("mixed", c_void_p),
        ("wide", c_void_p),
        ("panels", c_void_p),
        ("chunks", c_void_p),
        ("phases", c_void_p),
        ("logits", c_void_p),
    )
