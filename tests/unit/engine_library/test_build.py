"""What an engine over a library refuses before it runs, in words for a person."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from superfluid_core.clock import SystemClock
from superfluid_core.engine.base import Capabilities, EngineInfo
from superfluid_core.engine.compose import StepRow
from superfluid_core.engine.foreign.engine import LibraryEngine
from superfluid_core.engine.torch.drive import Driver
from superfluid_core.errors import ConfigError, EngineError, ErrorCode
from superfluid_core.scheduler.plan import TickPlan
from superfluid_core.session import (
    Determinism,
    Grammar,
    GrammarKind,
    QosClass,
    SamplingParams,
    SessionKey,
    SessionSpec,
)
from superfluid_core.wire.messages import Open
from superfluid_noded.build import check_engine, find_models, scheduler_sizes
from superfluid_noded.config import Surroundings, build_config, read_settings
from superfluid_noded.judge import Denial, judge_open
from tests.unit.engine_library.conftest import Make, build, need, write_checkpoint

NOWHERE = Surroundings(None, None, None, None)


def test_files_of_the_other_kind_are_refused(checkpoint: Path, gguf_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"reads \.gguf files"):
        build("llamacpp", checkpoint)
    with pytest.raises(ConfigError, match="directories of safetensors"):
        build("mlx", gguf_file)


def test_options_that_do_not_fit_are_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match="at most 512"):
        make(window=513)
    with pytest.raises(ConfigError, match="--device tpu"):
        make(device="tpu")


def test_llama_cpp_says_what_it_has_not(gguf_file: Path) -> None:
    with pytest.raises(ConfigError, match="without a GPU"):
        build("llamacpp", gguf_file, device="cuda")
    with pytest.raises(ConfigError, match="at most 255 lanes"):
        build("llamacpp", gguf_file, lanes=256)


def test_a_file_that_llama_cpp_cannot_load_is_one_line(gguf_file: Path, tmp_path: Path) -> None:
    data = bytearray(gguf_file.read_bytes())
    place = data.index(b"blk.1.attn_q.weight")
    data[place : place + 5] = b"blx.1"
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(data)
    with pytest.raises(EngineError, match=r"cannot load the model: .+"):
        build("llamacpp", broken)


def test_a_library_with_another_layout_is_refused_before_it_is_used() -> None:
    need("llamacpp")
    from superfluid_core.engine.llamacpp import binding

    good = binding.load_binding()
    moved = good.call("llama_context_default_params")
    moved.n_seq_max, moved.n_ubatch = moved.n_ubatch, moved.n_seq_max
    with pytest.raises(
        ConfigError, match=r"another layout of parameters \(ContextParams\.n_ubatch\)"
    ):
        good._check(binding.ContextParams, moved, binding._CONTEXT_DEFAULTS)
    with pytest.raises(ConfigError, match="cannot be used"):
        binding.Binding(Path(ctypes.__file__), "1")


@pytest.mark.parametrize("library", ["llamacpp", "mlx"])
def test_windows_that_a_library_leaves_out_are_refused_above_them(
    library: str, tmp_path: Path
) -> None:
    need(library)
    path = write_checkpoint(
        tmp_path / "m",
        architectures=["MistralForCausalLM"],
        model_type="mistral",
        sliding_window=64,
    )
    if library == "llamacpp":
        from tests.unit.engine_torch.family_gguf import write_family

        write_family(path, "mistral", tmp_path / "m.gguf")
        path = tmp_path / "m.gguf"
    with pytest.raises(ConfigError, match="window of 64 tokens; --max-context 64"):
        build(library, path)
    build(library, path, window=64).close()


def test_a_checkpoint_that_was_quantized_is_not_given_to_mlx(tmp_path: Path) -> None:
    table = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    path = write_checkpoint(tmp_path / "m", quantization_config=table)
    with pytest.raises(ConfigError, match=r"these are quantized otherwise .fp8."):
        build("mlx", path)


def test_a_checkpoint_with_code_of_its_own_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "m", model_file="evil.py")
    (path / "evil.py").write_text("raise SystemExit('was run')")
    with pytest.raises(ConfigError, match="code of its own"):
        build("mlx", path)


def test_a_node_says_what_an_engine_needs_and_runs(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settings(**flags: Any) -> Any:
        return build_config(read_settings({"model": "demo"} | flags, None), NOWHERE)

    need("llamacpp")
    need("mlx")
    config = settings(engine="llamacpp")
    (model,) = find_models(config)
    assert check_engine(config, model) == "llamacpp (device auto, dtype auto)"
    with pytest.raises(ConfigError, match="runs a directory of safetensors"):
        check_engine(settings(engine="mlx"), model)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"needs xllamacpp: pip install 'superfluid-fleet\[llama"):
        find_models(config)
    with pytest.raises(ConfigError, match=r"needs mlx: pip install 'superfluid-fleet\[mlx\]'"):
        find_models(settings(engine="mlx"))


def test_requests_beyond_its_capabilities_are_refused_before_they_are_queued(make: Make) -> None:
    info = make(kv_blocks=16).describe()
    asked = Open(
        session=1, epoch=1, model="m", prompt=(1, 2, 3), delivered=(), max_output=10, min_output=0,
        sampling=SamplingParams(logprobs=2, presence_penalty=1.0, logit_bias=((5, 1.0),)), choice=0, stop_ids=(),
        ignore_eos=False, grammar=Grammar(GrammarKind.REGEX, "a+"), qos=QosClass.AGENT, tenant="t",
        batch_invariant=False, cache_salt=b"", lease_stamp_ns=0, lease_ttl_ms=1000,
    )  # fmt: skip
    key = SessionKey("h", 1)
    assert isinstance(judge_open(asked, info, key, 5), SessionSpec)
    for beyond in ({"batch_invariant": True}, {"prompt_logprobs": 1}):
        denial = judge_open(replace(asked, **beyond), info, key, 5)
        assert isinstance(denial, Denial)
        assert denial.code is ErrorCode.UNSUPPORTED
    park = build_config(read_settings({"model": "demo", "park": True}, None), NOWHERE)
    with pytest.raises(ConfigError, match="--park: this engine cannot move KV"):
        scheduler_sizes(park, info)


class Canned:
    """A library that gives the same logits for every lane."""

    def __init__(self, line: Tensor) -> None:
        self.line = line
        self.closed = 0

    def open(self, plan: TickPlan) -> None:
        del plan

    def forward(self, rows: Sequence[StepRow]) -> Tensor:
        wanted = [row for row in rows if row.samples]
        found = self.line.repeat(len(wanted), 1)
        for number, row in enumerate(wanted):
            if row.lane == 1 and row.output_index == 1:
                found[number, 2] = torch.nan
        return found

    def close(self) -> None:
        self.closed += 1


def canned(line: Tensor) -> tuple[LibraryEngine, Canned]:
    library = Canned(line)
    info = EngineInfo(
        "w", "t", "canned", "float32", "cpu", 8, (7,), 64, 4, 4, 32, 16, Determinism.NONE,
        capabilities=Capabilities(),
    )  # fmt: skip
    return LibraryEngine(info, library, SystemClock()), library


def test_logits_that_are_not_finite_end_their_lane_only() -> None:
    engine, library = canned(torch.arange(8.0))
    driver = Driver(engine)
    good, bad = driver.open([1, 2], 4), driver.open([1, 2, 3], 4)
    assert bad.lane == 1
    driver.finish()
    assert (bad.outputs, good.outputs) == ([7], [7] * 4)
    assert bad.fault is not None
    assert bad.fault.code is ErrorCode.NAN_LOGITS
    assert good.fault is None
    engine.close()
    engine.close()
    assert library.closed == 1


def test_an_id_outside_the_vocabulary_ends_its_lane_only() -> None:
    engine, _ = canned(torch.arange(8.0))
    driver = Driver(engine)
    good, bad = driver.open([1, 2], 2), driver.open([1, 99], 4)
    driver.finish()
    assert bad.fault is not None
    assert bad.fault.code is ErrorCode.INVALID_REQUEST
    assert good.outputs == [7, 7]
