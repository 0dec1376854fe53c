"""Every family beside Llama and Qwen against transformers in float32, and its GGUF against llama.cpp, on tiny random checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from superfluid_core.engine.compose import StepRow
from superfluid_core.engine.torch import build
from superfluid_core.engine.torch.capabilities import compiled_gap
from superfluid_core.engine.torch.drive import Driver
from superfluid_core.engine.torch.engine import TorchEngine
from superfluid_core.engine.torch.outline import outline, quantized_gap
from superfluid_core.engine.torch.quantized_linear import TorchProducts
from superfluid_core.modelfiles.config import config_from_hf, config_to_hf
from superfluid_core.modelfiles.inventory import inventory
from tests.unit.engine_torch.conftest import files_of
from tests.unit.engine_torch.families import GGUF_NAMES, NAMES, WINDOW, make_model
from tests.unit.engine_torch.family_gguf import read_tensors, write_family
from tests.unit.engine_torch.native import cache_folder

pytestmark = [pytest.mark.reference, pytest.mark.slow, pytest.mark.timeout(180)]
Build = Callable[..., TorchEngine]
Family = Callable[[str], tuple[Path, Any]]
OUTPUT = 8
SHARDED = ("phi3", "qwen3moe", "gemma3")
COMPILED = ("mistral", "phi3", "phi4")
LENGTHS = (1, 37, 60, 16)


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """(directory, transformers model) of a family, made once."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(name: str) -> tuple[Path, Any]:
        if name not in made:
            model = make_model(name)
            path = tmp_path_factory.mktemp(name)
            model.save_pretrained(path, max_shard_size="100KB" if name in SHARDED else "5GB")
            made[name] = (path, model)
        return made[name]

    return make


def prompt(length: int, seed: int = 5) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 300, (length,), generator=generator).tolist()


def watched(engine: TorchEngine) -> dict[int, list[torch.Tensor]]:
    """Collect the logits of every draw, by lane."""
    seen: dict[int, list[torch.Tensor]] = {}

    def keep(rows: list[StepRow], logits: torch.Tensor) -> None:
        for row, line in zip(rows, logits, strict=True):
            seen.setdefault(row.lane, []).append(line.clone())

    engine.on_logits = keep  # type: ignore[assignment]
    return seen


def logits_of(engine: TorchEngine, text: list[int]) -> torch.Tensor:
    """Logits after a prompt that comes in chunks over scattered blocks."""
    seen = watched(engine)
    driver = Driver(engine, blocks=[(block * 29 + 3) % 64 for block in range(64)])
    session = driver.open(text, 1)
    driver.finish(prompt_tokens=13)
    return seen[session.lane][-1]


def check_against(model: Any, engine: TorchEngine) -> None:
    """Run lanes together, some of them later, prompts in chunks, blocks scattered; compare every draw."""
    seen = watched(engine)
    driver = Driver(engine, blocks=[(block * 29 + 3) % 96 for block in range(96)])
    texts = [prompt(length, length) for length in LENGTHS]
    sessions = [driver.open(text, OUTPUT) for text in texts[:2]]
    driver.tick(steps=2, prompt_tokens=11, step_tokens=9)
    sessions += [driver.open(text, OUTPUT) for text in texts[2:]]
    driver.finish(steps=3, prompt_tokens=11, step_tokens=9)
    for session, text in zip(sessions, texts, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([session.context])).logits[0, len(text) - 1 : -1]
        assert session.outputs == expected.argmax(-1).tolist()
        found = torch.stack(seen[session.lane])
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert any(step.prefilled and step.ids for step in driver.steps), "no mixed step was run"


@pytest.mark.parametrize("name", NAMES)
def test_mixed_chunked_paged_logits_agree_with_transformers(
    name: str, family: Family, build_engine: Build
) -> None:
    path, model = family(name)
    assert (len(list(path.glob("*.safetensors"))) > 1) == (name in SHARDED)
    seen = outline(files_of(path))
    assert (seen.problem, set(seen.stored)) == (None, set(read_tensors(path)))
    check_against(model, build_engine(path, kv_blocks=96, block_tokens=4))


@pytest.mark.parametrize("name", COMPILED)
def test_the_compiled_path_computes_the_families_that_it_takes(
    name: str, family: Family, build_engine: Build
) -> None:
    path, model = family(name)
    engine = build_engine(path, kv_blocks=96, block_tokens=4, cache_dir=cache_folder())
    assert "C++ ops" in engine.describe().engine_build
    check_against(model, engine)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in COMPILED])
def test_what_the_compiled_path_cannot_do_is_said_and_falls_to_the_plain_one(
    name: str, family: Family, build_engine: Build
) -> None:
    path, model = family(name)
    assert compiled_gap(files_of(path).config)
    engine = build_engine(path, kv_blocks=64, block_tokens=4, cache_dir=cache_folder())
    assert "C++" not in engine.describe().engine_build
    with torch.no_grad():
        expected = model(torch.tensor([prompt(50)])).logits[0, -1]
    torch.testing.assert_close(logits_of(engine, prompt(50)), expected, atol=1e-4, rtol=1e-4)


class Judge:
    """llama.cpp over one file, asked for the likeliest ids of every step."""

    def __init__(self, path: Path) -> None:
        from tests.unit.engine_torch.test_demo_model import LlamaCpp

        self._server = LlamaCpp(path, slots=1)

    def likeliest(self, text: list[int], count: int) -> list[dict[int, float]]:
        """Log-probabilities of the ten likeliest ids of each greedy step, and of the one that was taken first."""
        asked = {"prompt": text, "n_predict": count, "temperature": 0.0, "n_probs": 10}
        asked |= {"ignore_eos": False, "cache_prompt": False, "return_tokens": True}
        steps = self._server._post("/completion", asked)["completion_probabilities"]
        return [{top["id"]: top["logprob"] for top in step["top_logprobs"]} for step in steps]


@pytest.mark.parametrize("name", GGUF_NAMES)
def test_a_gguf_file_gives_what_its_checkpoint_and_llama_cpp_give(
    name: str, family: Family, build_engine: Build, tmp_path: Path
) -> None:
    path, model = family(name)
    target = tmp_path / "tiny.gguf"
    write_family(path, name, target)
    config = files_of(target).config
    seen = outline(files_of(target))
    assert seen.problem is None
    assert seen.stored == {held.name for held in inventory(target, "gguf")}
    assert config_from_hf(config_to_hf(config)) == config
    engine = build_engine(target, kv_blocks=96, block_tokens=4)
    check_against(model, engine)
    # llama.cpp leaves Mistral's and Phi's windows out: compared where they show nothing
    text = prompt(10 if name in ("mistral", "phi3") else 50)
    steps = Judge(target).likeliest(text, OUTPUT)
    assert len(steps) > OUTPUT // 2
    for number, step in enumerate(steps):
        taken = [max(earlier, key=earlier.__getitem__) for earlier in steps[:number]]
        found = logits_of(engine, text + taken).log_softmax(-1)
        for token, logprob in step.items():
            assert float(found[token]) == pytest.approx(logprob, abs=3e-3)


@pytest.mark.parametrize("name", ["mistral", "phi3", "phi4", "gemma3-16", "qwen3moe"])
def test_quantized_files_are_read_from_the_cache_and_in_small_steps_as_without(
    name: str, family: Family, build_engine: Build, tmp_path: Path
) -> None:
    import gguf

    path, _ = family(name)
    target = tmp_path / "tiny.gguf"
    write_family(path, name, target, gguf.GGMLQuantizationType.Q4_0)
    plain = logits_of(build_engine(target, kv_blocks=64, block_tokens=4), prompt(50))
    gap = quantized_gap(files_of(target).config, outline(files_of(target)).taken)
    assert gap is None
    for _ in range(2):  # the second finds what the first has kept
        options = {"kv_blocks": 64, "block_tokens": 4, "cache_dir": cache_folder()}
        again = build_engine(target, **options)
        torch.testing.assert_close(logits_of(again, prompt(50)), plain, atol=1e-4, rtol=1e-4)
        narrow = build_engine(target, dtype="bfloat16", **options)
        is_small = "quantized small steps" in narrow.describe().engine_build
        assert is_small == (name in COMPILED)
        assert float((logits_of(narrow, prompt(50)) - plain).abs().mean()) < 0.05


@pytest.mark.parametrize("name", GGUF_NAMES)
def test_matrices_that_stay_quantized_give_what_dequantized_ones_give(
    name: str,
    family: Family,
    build_engine: Build,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fused, interleaved, in experts or under other norms: plain torch stands for the kernels."""
    import gguf

    path, _ = family(name)
    target = tmp_path / "tiny.gguf"
    write_family(path, name, target, gguf.GGMLQuantizationType.Q8_0)
    plain = logits_of(build_engine(target, kv_blocks=64, block_tokens=4), prompt(50))
    monkeypatch.setattr(build, "choose_products", lambda *_: TorchProducts())
    engine = build_engine(target, kv_blocks=64, block_tokens=4)
    assert "weights kept quantized" in engine.describe().engine_build
    torch.testing.assert_close(logits_of(engine, prompt(50)), plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmo2", "granite", "smollm3"])
def test_batch_invariant_lanes_give_the_same_bits_however_they_are_cut(
    name: str, family: Family, build_engine: Build
) -> None:
    path, model = family(name)
    engine = build_engine(path, kv_blocks=64, block_tokens=4)
    assert engine.describe().capabilities.batch_invariant
    text, found = prompt(45), []
    for cut, others in ((45, 0), (7, 2)):
        seen = watched(engine)
        driver = Driver(engine)
        driver.batch_invariant = True
        sessions = [driver.open(text, 4), *(driver.open(prompt(9, n), 4) for n in range(others))]
        driver.finish(steps=2, prompt_tokens=cut)
        found.append(torch.stack(seen[sessions[0].lane]))
        for session in sessions:
            driver.close(session)
        engine.run(driver.plan(1), lambda _: None, lambda: False)
    assert torch.equal(found[0], found[1])
    with torch.no_grad():
        expected = model(torch.tensor([text])).logits[0, -1]
    torch.testing.assert_close(found[0][0], expected, atol=1e-4, rtol=1e-4)


def test_experts_are_neither_batch_invariant_nor_recorded(
    family: Family, build_engine: Build
) -> None:
    from superfluid_core.engine.torch.build import TorchOptions, build_torch_engine

    path, _ = family("qwen3moe")
    lines: list[str] = []
    options = TorchOptions(device="cpu", dtype="float32", threads=1, kv_blocks=8, graphs=True)
    info = build_torch_engine(files_of(path), options, say=lines.append).describe()
    assert not info.capabilities.batch_invariant
    assert info.blocks == 8, "a spare block was taken for recorded steps"
    assert any("not recorded: the host asks which experts" in line for line in lines)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "smollm3"])
def test_recorded_steps_equal_eager_ones_where_layers_differ(
    name: str, family: Family, build_engine: Build
) -> None:
    path, _ = family(name)
    outputs = []
    for graphs in (False, True):
        engine = build_engine(path, kv_blocks=96, block_tokens=4, window=128, graphs=graphs)
        driver = Driver(engine)
        sessions = [driver.open(prompt(length, length), 12) for length in LENGTHS]
        driver.finish(steps=6)
        outputs.append([session.outputs for session in sessions])
    assert outputs[0] == outputs[1]


def test_the_text_part_of_a_model_that_sees_is_found(
    family: Family, build_engine: Build, tmp_path: Path
) -> None:
    source, model = family("gemma3")
    target = tmp_path / "seeing"
    shutil.copytree(source, target)
    (target / "model.safetensors.index.json").unlink()
    for number, file in enumerate(sorted(target.glob("*.safetensors"))):
        tensors = load_file(file)
        file.unlink()
        renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
        save_file(renamed, target / f"part-{number}.safetensors")
    inner = json.loads((source / "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": inner}
    (target / "config.json").write_text(json.dumps(outer))
    engine = build_engine(target, kv_blocks=64, block_tokens=4)
    with torch.no_grad():
        expected = model(torch.tensor([prompt(50)])).logits[0, -1]
    torch.testing.assert_close(logits_of(engine, prompt(50)), expected, atol=1e-4, rtol=1e-4)


def test_short_factors_turn_a_window_within_the_original_one(
    family: Family, build_engine: Build
) -> None:
    path, model = family("phi4")
    engine = build_engine(path, kv_blocks=64, block_tokens=4, window=8)
    with torch.no_grad():
        expected = model(torch.tensor([prompt(7)])).logits[0, -1]
        stretched = logits_of(build_engine(path, kv_blocks=64, block_tokens=4), prompt(7))
    torch.testing.assert_close(logits_of(engine, prompt(7)), expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(stretched, expected, atol=1e-3), "both windows turn alike"
    assert WINDOW > 8


def test_bfloat16_stays_near_float32(family: Family, build_engine: Build) -> None:
    for name in ("gemma2", "gemma3", "qwen3moe"):
        path, _ = family(name)
        wide, narrow = (
            logits_of(build_engine(path, kv_blocks=64, dtype=dtype, block_tokens=4), prompt(50))
            for dtype in ("float32", "bfloat16")
        )
        assert float((wide - narrow).abs().mean()) < 0.06, name
