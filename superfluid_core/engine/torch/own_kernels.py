"""Whether kernels of our own run on this machine's CUDA device: settled once, by running one.

Owns the trial, and the words for what a compiler or a driver says. Triton being installed proves little: it comes with every CUDA build of
torch, and needs a C compiler, Python's headers and a directory to write to when it launches its first kernel. Where any of it is
missing, whatever would launch a kernel of ours does the same in plain torch; `gap` says why. The trial must not come first inside
of a recording: steps run before they are recorded.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everyone knows it by

REASON_CHARS_MAX = 200
BOUND = 1e-3


def reason_of(error: Exception) -> str:
    """Say in a line what a kernel, or whoever compiles it, failed with."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text[:REASON_CHARS_MAX]}"


@cache
def gap() -> str | None:
    """Say why our own kernels cannot run on the CUDA device; None when they can."""
    if importlib.util.find_spec("triton") is None:
        return "the triton package is not installed"
    try:
        off = _difference()
    except Exception as error:  # noqa: BLE001 - compilers and drivers fail in any way, and plain torch does as well
        return reason_of(error)
    return None if off <= BOUND else f"a kernel is off by {off:.2g}"


def _difference() -> float:
    """Run the smallest of them beside plain torch."""
    from superfluid_core.engine.torch.triton.passes import silu_mul

    both = torch.linspace(-2, 2, 2 * 96, device="cuda").view(2, 96)
    gate, up = both.chunk(2, dim=-1)
    return float((silu_mul(both) - F.silu(gate) * up).abs().max())
