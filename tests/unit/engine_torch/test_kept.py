"""Whole engines over matrices that stay quantized: plain torch stands for the kernels, and says what the dequantized engine says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import pytest
import torch

from superfluid_core.engine.torch import build
from superfluid_core.engine.torch.build import TorchOptions, build_torch_engine
from superfluid_core.engine.torch.compressed.rows import Fp8Rows
from superfluid_core.engine.torch.drive import Driver
from superfluid_core.engine.torch.engine import TorchEngine
from superfluid_core.engine.torch.parallel.group import Ranks
from superfluid_core.engine.torch.parallel.shards import load_shard, share_of
from superfluid_core.engine.torch.quantized import to_int8
from superfluid_core.engine.torch.quantized_linear import (
    Keeper,
    Products,
    QuantizedLinear,
    TorchProducts,
)
from superfluid_core.engine.torch.selftest.model import TinySizes, write_tiny_model
from superfluid_core.engine.torch.sources import gguf_name
from superfluid_core.engine.torch.weights import load_weights
from superfluid_core.errors import ConfigError
from tests.unit.engine_torch.conftest import files_of
from tests.unit.engine_torch.family_gguf import finish, read_tensors, started
from tests.unit.engine_torch.packers import FORMS, publish

SIZES = TinySizes(300, 256, 512, 2, 4, 2, 64, 512)
PROMPTS = ([5, 6, 7, 8], list(range(40, 80)), [9] * 3, list(range(290)))
KINDS = {"Q8_0": "Q8_0", "Q4_1": "Q4_1", "Q4_0": "Q8_0", "Q4_K": "Q4_K"}


def q4_k(weight: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Quantize rows as Q4_K: sub-blocks of 32 with scales and minima of 6 bits, under two halves a block of 256.

    The halves are powers of two: then the product with 6 bits is a half too, and kept rows have the very numbers of the file.
    """
    parts = weight.reshape(-1, 8, 32)
    low = np.minimum(parts.min(-1), 0)
    scale, minimum = (parts.max(-1) - low) / 15, -low
    halves = np.stack((scale.max(-1), minimum.max(-1)), 1) / 63
    halves = np.exp2(np.ceil(np.log2(halves))).astype(np.float16)
    d, m = halves.astype(np.float32)[:, :1], halves.astype(np.float32)[:, 1:]
    s6, m6 = (np.rint(a / b).clip(1, 63).astype(np.uint8) for a, b in ((scale, d), (minimum, m)))
    q = (parts + (m * m6)[..., None]) / (d * s6)[..., None]
    q = np.rint(q).clip(0, 15).astype(np.uint8)
    small = np.concatenate(
        (
            (s6[:, :4] & 63) | (s6[:, 4:] >> 4 << 6),
            (m6[:, :4] & 63) | (m6[:, 4:] >> 4 << 6),
            (s6[:, 4:] & 15) | (m6[:, 4:] << 4),
        ),
        1,
    )
    packed = (q[:, ::2] | (q[:, 1::2] << 4)).reshape(len(q), -1)
    blocks = np.concatenate((halves.view(np.uint8).reshape(-1, 4), small, packed), 1)
    return blocks.reshape(weight.shape[0], -1)


def write_quantized(directory: Path, kind: str, *, is_mixed: bool = False) -> Path:
    """Write a tiny Qwen 3 as GGUF; of a mixed one values and down products are int8, and one matrix stays plain."""
    model = write_tiny_model(directory, SIZES)
    path = directory / "tiny.gguf"
    writer = started(path, "qwen3", model.config)
    for name, tensor in read_tensors(directory).items():
        numbers = tensor.float().numpy()
        own = kind
        if "embed" in name:
            own = KINDS.get(kind, "Q8_0")
        elif is_mixed and ("v_proj" in name or "down_proj" in name):
            own = "Q8_0"
        if numbers.ndim == 1 or (is_mixed and "layers.1.self_attn.o_proj" in name):
            writer.add_tensor(gguf_name(name), numbers)
        elif own == "Q4_K":
            raw = q4_k(numbers)
            writer.add_tensor(gguf_name(name), raw, raw_dtype=gguf.GGMLQuantizationType.Q4_K)
        else:
            raw_dtype = gguf.GGMLQuantizationType[own]
            packed = gguf.quants.quantize(numbers, raw_dtype)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=raw_dtype)
    finish(writer)
    return path


def engine_of(path: Path, said: list[str] | None = None, **options: Any) -> TorchEngine:
    defaults: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1, "lanes": 4}
    told = TorchOptions(**(defaults | options))
    return build_torch_engine(files_of(path), told, say=(said if said is not None else []).append)


def greedy(engine: TorchEngine, *, batch_invariant: bool = False) -> list[list[int]]:
    driver = Driver(engine)
    driver.batch_invariant = batch_invariant
    sessions = [driver.open(prompt, 12) for prompt in PROMPTS]
    driver.finish(prompt_tokens=None if batch_invariant else 300)
    return [session.outputs for session in sessions]


@pytest.fixture
def kept_by_torch(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let plain torch stand for the kernels; what was wished is noted."""
    wishes: list[str] = []

    def choose(wanted: str, *_: object) -> Products | None:
        wishes.append(wanted)
        return TorchProducts() if wanted == "quantized" else None

    monkeypatch.setattr(build, "choose_products", choose)
    return wishes


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_kept_weights_say_what_dequantized_ones_say(
    kind: str, is_mixed: bool, tmp_path: Path, kept_by_torch: list[str]
) -> None:
    path, said = write_quantized(tmp_path, kind, is_mixed=is_mixed), list[str]()
    plain, kept = engine_of(path), engine_of(path, said, weights="quantized")
    assert kept_by_torch == ["auto", "quantized"]
    wanted = greedy(plain)
    assert len({token for ids in wanted for token in ids}) > 8
    assert greedy(kept) == wanted
    matrices = 2 * 7 + 1 - is_mixed
    assert said[0].startswith(f"{matrices} matrices stay quantized, ")
    assert kept.describe().engine_build != plain.describe().engine_build
    assert "weights kept quantized" in kept.describe().engine_build


@pytest.mark.parametrize(
    "form", ["awq-32", "gptq-4-sym", "gptq-8-sym", "fp8-powers", "fp8-tensor", "ct-fp8-channel", "ct-4-zeros"]
)  # fmt: skip
def test_quantized_safetensors_kept_say_what_the_plain_checkpoint_says(
    form: str, tmp_path: Path, kept_by_torch: list[str]
) -> None:
    write_tiny_model(tmp_path, SIZES)
    small, plain = publish(tmp_path, FORMS[form], tmp_path / "published")
    said: list[str] = []
    kept = engine_of(small, said, weights="quantized")
    assert said[0].startswith("14 matrices stay quantized, ")
    wanted = greedy(engine_of(plain))
    assert len({token for ids in wanted for token in ids}) > 8
    assert greedy(kept) == wanted


def test_matrices_whose_blocks_cut_through_groups_are_dequantized_and_the_rest_is_kept(
    tmp_path: Path, kept_by_torch: list[str]
) -> None:
    write_tiny_model(tmp_path, SIZES)
    small, plain = publish(
        tmp_path, FORMS["fp8-block"], tmp_path / "published"
    )  # blocks of 40 x 48
    with pytest.raises(ConfigError, match="can be kept so"):
        engine_of(small, weights="quantized")
    assert greedy(engine_of(small)) == greedy(engine_of(plain))


def test_wider_formats_are_kept_as_int8_and_nearly_say_the_same(
    tmp_path: Path, kept_by_torch: list[str]
) -> None:
    path, found = write_quantized(tmp_path, "Q5_1"), []
    for weights in ("auto", "quantized"):
        engine = engine_of(path, weights=weights)
        driver = Driver(engine)
        driver.open(PROMPTS[1], 1)
        found.append(engine.forward_only(driver.plan(steps=1)))
    off, spread = float((found[0] - found[1]).abs().mean()), float(found[0].std())
    assert 0 < off < 0.05 * spread


def test_batch_invariant_lanes_keep_their_promise(tmp_path: Path, kept_by_torch: list[str]) -> None:
    engine = engine_of(write_quantized(tmp_path, "Q4_1"), weights="quantized")
    assert engine.describe().capabilities.batch_invariant
    assert greedy(engine, batch_invariant=True) == greedy(
        engine_of(write_quantized(tmp_path, "Q4_1")), batch_invariant=True
    )


def test_recorded_steps_over_kept_weights_say_the_same(
    tmp_path: Path, kept_by_torch: list[str]
) -> None:
    path = write_quantized(tmp_path, "Q4_K")
    recorded = engine_of(path, weights="quantized", graphs=True)
    assert greedy(recorded) == greedy(engine_of(path, weights="quantized"))


def test_a_matrix_with_a_plain_part_is_dequantized_and_the_others_are_not(
    tmp_path: Path, kept_by_torch: list[str]
) -> None:
    files = files_of(write_quantized(tmp_path, "Q4_1", is_mixed=True))
    device = torch.device("cpu")
    keeper = Keeper(TorchProducts(), device, torch.float32)
    weights = load_weights(files, 64, device, torch.float32, keeper)
    assert not isinstance(weights.layers[1].out, QuantizedLinear)
    products = [weights.head, weights.layers[0].out, weights.layers[1].qkv, weights.layers[1].down]
    assert all(isinstance(each, QuantizedLinear) for each in products)


def test_plain_weights_cannot_be_kept_quantized(tmp_path: Path, kept_by_torch: list[str]) -> None:
    files = write_tiny_model(tmp_path, SIZES)
    with pytest.raises(ConfigError, match="can be kept so"):
        build_torch_engine(files, TorchOptions(device="cpu", weights="quantized"))


def test_a_misshapen_matrix_is_named_though_it_is_quantized(
    tmp_path: Path, kept_by_torch: list[str]
) -> None:
    files = files_of(write_quantized(tmp_path, "Q8_0"))
    config = dataclasses.replace(files.config, intermediate=256)
    wrong = dataclasses.replace(files, config=config)
    with pytest.raises(Exception, match=r"mlp.gate_proj.weight.*\(512, 256\).*\(256, 256\)"):
        build_torch_engine(wrong, TorchOptions(device="cpu", weights="quantized"))


def test_a_cpu_refuses_to_keep_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--weights quantized: it needs a CUDA device"):
        engine_of(write_quantized(tmp_path, "Q8_0"), weights="quantized")


def test_dequantized_weights_leave_a_cpu_no_small_steps(tmp_path: Path) -> None:
    files = files_of(write_quantized(tmp_path, "Q4_1"))
    found = {}
    for weights in ("auto", "dequantized"):
        options = TorchOptions(device="cpu", weights=weights)
        placed = build.Placed(torch.device("cpu"), torch.float32, options)
        loaded = build._load(files, 64, placed, tmp_path, lambda _: None)
        found[weights] = (loaded.quantized is not None, loaded.kept)
    assert found == {"auto": (True, ""), "dequantized": (False, "")}


def test_every_size_is_compiled_for_every_class_of_rows(
    tmp_path: Path, kept_by_torch: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int, int]] = []
    whole = QuantizedLinear.__call__

    def noted(self: QuantizedLinear, x: torch.Tensor) -> torch.Tensor:
        out = whole(self, x)
        seen.append((x.shape[0], x.shape[1], out.shape[1]))
        return out

    monkeypatch.setattr(QuantizedLinear, "__call__", noted)
    path = write_quantized(tmp_path, "Q4_1")
    options = TorchOptions(device="cpu", weights="quantized")
    placed = build.Placed(torch.device("cpu"), torch.float32, options)
    build._load(files_of(path), 64, placed, None, lambda _: None)
    sizes = {(256, 512), (256, 256), (256, 1024), (512, 256), (256, 300)}
    rows = {1, 17, 33, 65, 257}
    assert sorted(seen) == sorted((count, *size) for count in rows for size in sizes)


class Rank:
    """One of two ranks, whose sums are its own part."""

    def __init__(self, rank: int) -> None:
        self.rank, self.world, self.device = rank, 2, torch.device("cpu")

    def add(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_shares_of_kept_matrices_add_up_to_the_whole(kind: str, tmp_path: Path) -> None:
    files = files_of(write_quantized(tmp_path, kind))
    device, dtype = torch.device("cpu"), torch.float32
    keepers = [Keeper(TorchProducts(), device, dtype) for _ in range(3)]
    whole = load_weights(files, 64, device, dtype, keepers[0]).layers[1]
    parts = [
        load_shard(files, 64, dtype, cast("Ranks", Rank(rank)), keepers[rank + 1]).layers[1]
        for rank in range(2)
    ]
    assert [keeper.matrices for keeper in keepers] == [15, 15, 15]
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(1))
    halves = [part.down(own) for part, own in zip(parts, x.chunk(2, 1), strict=True)]
    torch.testing.assert_close(halves[0] + halves[1], whole.down(x), atol=1e-4, rtol=1e-4)
    gates = [part.gate_up(x[:, :256]).chunk(2, 1) for part in parts]
    wanted = torch.cat([gates[0][0], gates[1][0], gates[0][1], gates[1][1]], 1)
    torch.testing.assert_close(wanted, whole.gate_up(x[:, :256]), atol=1e-4, rtol=1e-4)


def test_shares_that_would_part_a_scale_are_not_kept() -> None:
    rows = to_int8(torch.ones(8, 96))
    assert share_of(rows, 1, 0, 2) is None
    assert share_of(rows, 0, 1, 2) is not None
    weight = torch.arange(96.0).reshape(8, 12).to(torch.float8_e4m3fn)
    floats = Fp8Rows(weight, torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), (4, 4))
    assert share_of(floats, 1, 0, 2) is None
    lower = share_of(floats, 0, 1, 2)
    assert isinstance(lower, Fp8Rows)
    assert lower.scale.tolist() == [[4.0, 5.0, 6.0]]
    assert torch.equal(lower.weight.float(), weight[4:].float())
    one = share_of(Fp8Rows(weight, torch.ones(1, 1), (8, 12)), 1, 1, 2)
    assert isinstance(one, Fp8Rows)
    assert (tuple(one.weight.shape), tuple(one.scale.shape)) == ((8, 6), (1, 1))
