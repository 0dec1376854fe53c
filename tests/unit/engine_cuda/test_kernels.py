"""Every Triton kernel: run by Triton's interpreter beside plain torch, and compiled to machine code for devices that are not here.

Both happen in processes of their own: whether kernels are interpreted is settled when triton is imported.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
KERNELS = ROOT / "superfluid_core/engine/torch/triton"
CHECKED = {
    "attention triton", "attention padded", "attention triton, turned and stored in one pass",
    "attention triton, decoding from fixed tensors", "add and norm", "gate and up", "a whole layer",
    "draw of open rows", "noise by value", "products of quantized matrices",
}  # fmt: skip
WHOLE = bool(os.environ.get("SUPERFLUID_TEST_KERNELS"))
CAPABILITIES = ("80", "90", "100")
SHARED_BYTES_MIN = 99 * 1024  # what a block of threads may share on 8.6 and 8.9


def lines_of(arguments: Sequence[str], interpret: str) -> list[dict[str, Any]]:
    environment = dict(os.environ) | {"TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        capture_output=True, text=True, timeout=3_000, check=False, env=environment, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def kernel_names() -> set[str]:
    """Find every function that a launch can name."""
    found = set()
    for path in KERNELS.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            is_jit = isinstance(node, ast.FunctionDef) and any(
                ast.unparse(each).startswith("triton.jit") for each in node.decorator_list
            )
            if is_jit and isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                found.add(node.name)
    return found


@pytest.mark.slow
@pytest.mark.timeout(3_000 if WHOLE else 120)
def test_every_kernel_computes_what_plain_torch_does() -> None:
    seeds = os.environ.get("SUPERFLUID_TEST_KERNELS", "1")
    arguments = ["superfluid_noded.selftest", "--device", "cpu", "--only", "kernels", "--json"]
    lines = lines_of([*arguments, "--seeds", seeds], "1")
    checks = [line for line in lines if "verdict" in line]
    failed = [line for line in checks if line["verdict"] == "failed"]
    assert not failed
    assert {line["name"] for line in checks if line["verdict"] == "ok"} == CHECKED
    left_out = {line["name"]: line["detail"] for line in checks if line["verdict"] == "left out"}
    assert left_out == {
        "attention flashinfer": "it needs a CUDA device",
        "attention varlen": "it needs a CUDA device",
        "speed of quantized products": "it needs a CUDA device",
    }


@pytest.mark.slow
@pytest.mark.timeout(3_000 if WHOLE else 400)
def test_every_kernel_compiles_for_every_generation_of_devices() -> None:
    arguments = ["superfluid_core.engine.torch.triton.ahead", *CAPABILITIES]
    if not WHOLE:
        arguments += ["--shape", "llama3-8b"]
    lines = lines_of(arguments, "0")
    assert {line["kernel"] for line in lines} == kernel_names()
    assert all(line["bytes"] > 0 for line in lines)
    for name in kernel_names():
        made = {str(line["capability"]) for line in lines if line["kernel"] == name}
        assert made == set(CAPABILITIES), name
    # what a block of threads may share on the smallest of these devices
    assert max(line["shared"] for line in lines) <= 160 * 1024


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_wide_heads_fit_into_the_smallest_of_devices() -> None:
    """Keys of heads of 256 numbers in 16 bits, or of 128 in 32, are twice as wide as those that the tiles were first made for."""
    code = (
        "import json, torch\n"
        "from superfluid_core.engine.torch.triton.ahead import SHAPES, attention_variants, compile_for\n"
        "for each in attention_variants(SHAPES['gemma3-4b'], torch.bfloat16):\n"
        "    print(json.dumps({'kernel': each.name, **compile_for(each, 89)}))\n"
    )
    environment = dict(os.environ) | {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, timeout=110, check=False, env=environment, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["kernel"] for line in lines} == {"split_kernel", "join_kernel", "prefill_kernel"}
    assert all(line["shared"] <= SHARED_BYTES_MIN for line in lines)
