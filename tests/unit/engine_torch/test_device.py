"""Device, dtype and pool size are decided at start, in words for a person."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from superfluid_core.engine.torch import device, linear
from superfluid_core.engine.torch.device import (
    Machine,
    PoolWish,
    choose_blocks,
    choose_device,
    choose_dtype,
    in_words,
)
from superfluid_core.engine.torch.linear import PackedLinear, PlainLinear, make_linear
from superfluid_core.errors import ConfigError, EngineError
from superfluid_core.modelfiles.config import config_from_hf

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Said(Machine):
    """A machine that has what the test says."""

    def __init__(
        self,
        *,
        cuda: bool = False,
        driver: str | None = None,
        bf16: bool = False,
        free: int = 1_000_000,
    ) -> None:
        self._cuda, self._driver, self._bf16, self._free = cuda, driver, bf16, free

    def cuda_works(self) -> bool:
        return self._cuda

    def nvidia_driver(self) -> str | None:
        return self._driver

    def fast_bf16(self) -> bool:
        return self._bf16

    def host_bytes_available(self) -> int:
        return self._free

    def cuda_bytes_free(self, device: torch.device) -> int:
        return self._free


def test_auto_takes_cuda_when_it_works_and_the_cpu_when_there_is_none() -> None:
    assert choose_device("auto", Said(cuda=True, driver="595.1")) == CUDA
    assert choose_device("auto", Said()) == CPU
    assert choose_device("cpu", Said(cuda=True)) == CPU
    assert choose_device("cuda:1", Said(cuda=True)) == torch.device("cuda:1")


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_a_device_that_torch_cannot_use_is_an_error_that_names_the_versions(wanted: str) -> None:
    with pytest.raises(EngineError) as caught:
        choose_device(wanted, Said(driver="595.45.04"))
    assert "595.45.04" in caught.value.message
    assert torch.__version__ in caught.value.message
    assert "CUDA" in caught.value.message


def test_cuda_without_a_device_is_an_error_too() -> None:
    with pytest.raises(EngineError, match="no NVIDIA driver"):
        choose_device("cuda", Said())


def test_a_device_is_told_with_its_memory_and_what_torch_stands_on() -> None:
    words = in_words(CPU, Said(free=3 << 30))
    assert words.startswith("cpu: ")
    assert f"threads, 3.0 GiB available; no NVIDIA driver found, torch {torch.__version__}" in words


def test_a_gpu_is_told_by_name_capability_memory_and_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=140 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    words = in_words(CUDA, Said(cuda=True, driver="570.86.15", free=130 << 30))
    told = "cuda: NVIDIA H200, compute capability 9.0, 140.0 GiB, 130.0 GiB free; NVIDIA driver 570"
    assert words.startswith(told)


def test_unknown_names_are_refused(tiny_config: Any) -> None:
    with pytest.raises(ConfigError, match="tpu"):
        choose_device("tpu", Said())
    with pytest.raises(ConfigError, match="int4"):
        choose_dtype("int4", tiny_config, CPU, Said())


@pytest.fixture
def tiny_config() -> Any:
    return config_from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 300,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "dtype": "float16",
        }
    )


def test_auto_dtype_is_the_checkpoints_on_cuda_and_what_is_fast_on_a_cpu(tiny_config: Any) -> None:
    assert choose_dtype("auto", tiny_config, CUDA, Said()) is torch.float16
    assert choose_dtype("auto", tiny_config, CPU, Said(bf16=True)) is torch.bfloat16
    assert choose_dtype("auto", tiny_config, CPU, Said()) is torch.float32
    assert choose_dtype("float32", tiny_config, CUDA, Said()) is torch.float32


@pytest.mark.parametrize(
    ("blocks", "memory", "device", "expected"),
    [
        (77, None, CPU, 77),
        (None, 5_000, CPU, 5),
        (None, None, CUDA, 900),
        (None, None, CPU, 125),
    ],
)
def test_the_pool_is_as_told_or_a_share_of_what_is_free(
    blocks: int | None, memory: int | None, device: torch.device, expected: int
) -> None:
    wish = PoolWish(1_000, 16, 2_000, blocks, memory)
    assert choose_blocks(wish, device, Said()) == expected


def test_a_small_host_gives_a_quarter_of_its_memory_and_an_empty_one_is_refused() -> None:
    wish = PoolWish(1_000, 16, 2_000, None, None)
    assert choose_blocks(wish, CPU, Said(free=40_000)) == 10
    with pytest.raises(ConfigError, match="no room"):
        choose_blocks(wish, CPU, Said(free=3_000))


@pytest.mark.parametrize(
    ("quota", "siblings", "expected"),
    [
        ("", "{}", 4),
        ("max 100000", "{}", 4),
        ("250000 100000", "{}", 2),
        ("50000 100000", "{}", 1),
        ("900000 100000", "0-3", 1),
        ("nonsense", "", 4),
    ],
)
def test_threads_are_cores_within_affinity_quota_and_torch(
    quota: str, siblings: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines(path: str) -> list[str]:
        if path.endswith("cpu.max"):
            return quota.splitlines()
        return siblings.format(path).splitlines()

    monkeypatch.setattr(device, "_lines", lines)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 5, 7})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert Machine().threads() == expected
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert Machine().threads() == 1


def test_this_machine_answers() -> None:
    machine = Machine()
    assert machine.host_bytes_available() > 0
    assert machine.threads() >= 1
    assert machine.torch_versions()[0] == torch.__version__
    assert isinstance(machine.fast_bf16(), bool)
    assert isinstance(machine.cuda_works(), bool)
    assert machine.nvidia_driver() is None or machine.nvidia_driver()


def test_packed_products_equal_plain_ones_and_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias = torch.randn(48, 32).bfloat16(), torch.randn(48).bfloat16()
    for rows in (1, 8, 33):
        x = torch.randn(rows, 32).bfloat16()
        plain = PlainLinear(weight, bias)(x)
        torch.testing.assert_close(make_linear(weight, bias)(x), plain, atol=0.05, rtol=0.05)
    monkeypatch.setattr(linear, "packing_works", lambda: False)
    assert isinstance(make_linear(weight), PlainLinear)
    assert isinstance(make_linear(weight.float()), PlainLinear)


def test_a_missing_private_operator_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(self: object, x: torch.Tensor) -> torch.Tensor:
        raise AttributeError("_linear_pointwise")

    monkeypatch.setattr(PackedLinear, "__call__", gone)
    linear.packing_works.cache_clear()
    assert not linear.packing_works()
    monkeypatch.undo()
    linear.packing_works.cache_clear()


def test_the_engine_takes_the_dtype_of_the_machine(
    tiny: Callable[[str], tuple[Path, Any]], build_engine: Callable[..., Any]
) -> None:
    engine = build_engine(tiny("llama")[0], dtype="auto", window=64)
    info = engine.describe()
    fast = Machine().fast_bf16()
    assert info.dtype == ("bfloat16" if fast else "float32")
    assert info.blocks == 4 * 64 // 16
