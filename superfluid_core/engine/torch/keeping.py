"""Whether a model's quantized weights stay as they are, or are dequantized when they are loaded.

Owns the choice and its trial: the kernels multiply small matrices of every kind beside plain torch, and where one raises or differs,
weights are dequantized and the operator hears why. On a CPU nothing is kept this way: there the steps of few rows read the file's own
weights through compiled code (small_step.py), which `auto` leaves as it is and `dequantized` turns off.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from superfluid_core.engine.torch.attention.choose import TOLERANCES, triton_missing
from superfluid_core.engine.torch.compressed.rows import Fp8Rows
from superfluid_core.engine.torch.grouped import GroupedMatrix, group_rows
from superfluid_core.engine.torch.own_kernels import reason_of
from superfluid_core.engine.torch.quantized import GROUP, QuantizedRows, to_int8
from superfluid_core.engine.torch.quantized_linear import (
    DEQUANTIZE_ROWS,
    Products,
    QuantizedLinear,
    Scratch,
    TorchProducts,
)
from superfluid_core.errors import ConfigError

AUTO, QUANTIZED, DEQUANTIZED = "auto", "quantized", "dequantized"
WISHES = (AUTO, QUANTIZED, DEQUANTIZED)
TRIAL_ROWS = (1, 40, DEQUANTIZE_ROWS + 1)
TRIAL_OUTPUTS, TRIAL_INPUTS = 72, 640


def choose_products(
    wanted: str, device: torch.device, dtype: torch.dtype, say: Callable[[str], None]
) -> Products | None:
    """Choose what multiplies by quantized weights; None: they are dequantized. Tells `say` of a device that cannot.

    Raises ConfigError when they were to stay as they are and cannot.
    """
    if wanted not in WISHES:
        raise ConfigError(f"weights {wanted[:40]!r} are none of {', '.join(WISHES)}")
    if wanted == DEQUANTIZED or (wanted == AUTO and device.type != "cuda"):
        return None
    reason = unfit_products(device, dtype)
    if reason is None:
        from superfluid_core.engine.torch.triton.products import TritonProducts

        return TritonProducts()
    if wanted == QUANTIZED:
        raise ConfigError(f"--weights quantized: {reason}")
    say(f"quantized weights are dequantized: {reason}")
    return None


def unfit_products(device: torch.device, dtype: torch.dtype) -> str | None:
    """Say why our own kernels cannot multiply by quantized weights here; None when they can."""
    missing = triton_missing(device, dtype)
    if missing is not None:
        return missing
    try:
        from superfluid_core.engine.torch.triton.products import TritonProducts

        with torch.inference_mode():
            off = _difference(TritonProducts(), device, dtype)
    except Exception as error:  # noqa: BLE001 - compilers and drivers fail in any way, and weights are dequantized then
        return reason_of(error)
    bound = TOLERANCES[dtype]
    return None if off <= bound else f"it is off by {off:.2g} in a trial, {bound:g} is allowed"


def drawn_matrices(
    device: torch.device, outputs: int, inputs: int, seed: int = 1
) -> list[GroupedMatrix]:
    """Make a matrix of each kind of random numbers, all on the device."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn((outputs, inputs), generator=generator)
    q = torch.randint(0, 16, (outputs, inputs), generator=generator, dtype=torch.uint8)
    scale = torch.rand((outputs, inputs // GROUP), generator=generator).half() / 4
    floats = Fp8Rows(
        weight.to(torch.float8_e4m3fn),
        torch.rand((-(-outputs // 64), -(-inputs // 128)), generator=generator) + 0.5,
        (64, 128),
    )
    rows = (QuantizedRows(q, scale, scale * -8), to_int8(weight), floats)
    made = [group_rows(each, device) for each in rows]
    return [matrix for matrix in made if matrix is not None]


def _difference(products: Products, device: torch.device, dtype: torch.dtype) -> float:
    """Multiply by a matrix of each kind, in each way that the number of rows may choose; the largest difference."""
    off = [torch.zeros((), device=device)]
    generator = torch.Generator().manual_seed(2)
    bias = (torch.randn(3 * TRIAL_OUTPUTS, generator=generator) / 4).to(dtype).to(device)
    matrices = drawn_matrices(device, TRIAL_OUTPUTS, TRIAL_INPUTS)
    pair = [
        QuantizedLinear(matrices, bias, own, Scratch(device, dtype))
        for own in (products, TorchProducts())
    ]
    for rows in TRIAL_ROWS:
        drawn: Tensor = torch.randn((rows, TRIAL_INPUTS), generator=generator)
        x = (drawn / (4 * TRIAL_INPUTS**0.5)).to(dtype).to(device)
        found, wanted = (linear(x).float() for linear in pair)
        off.append((found - wanted).abs().max())
    return float(torch.stack(off).max())
