"""`inspect`: what is said of a model that can be served, and the words and the exit status for one that cannot."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from superfluid_core.engine.torch import capabilities, outline
from superfluid_core.engine.torch.dequant import DECODERS
from superfluid_core.engine.torch.device import Machine
from superfluid_core.engine.torch.selftest.model import FILE, TinySizes, write_tiny_model
from superfluid_core.modelfiles.gguf import GgmlType
from superfluid_core.modelfiles.resolve import resolve
from superfluid_head.commands.inspect import inspect as head_inspect
from superfluid_noded.cli import run
from tests.unit.engine_torch.packers import FORMS, publish

EMBEDDING = "model.embed_tokens.weight"
SIZES = TinySizes(300, 32, 48, 2, 4, 2, 16, 128)


def report_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = run(["inspect", *arguments, "--device", "cpu", "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A tiny Qwen 3 whose vocabulary is bytes."""
    write_tiny_model(tmp_path, SIZES)
    write_tokenizer(tmp_path)
    return tmp_path


def write_tokenizer(path: Path) -> None:
    signs = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = {sign: number for number, sign in enumerate([*signs, "<|im_end|>"])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|im_end|>"])
    made.save(str(path / "tokenizer.json"))


def test_the_demo_model_is_understood(capsys: pytest.CaptureFixture[str]) -> None:
    status, report = report_of(capsys, "demo", "--dtype", "bfloat16")
    assert (status, report["error"]) == (0, None)
    assert (report["architecture"], report["layers"], report["form"]) == ("llama", 30, "gguf")
    assert (report["heads"], report["kv_heads"], report["context"]) == (9, 3, 8192)
    assert report["window"] is None
    weights = report["weights"]
    assert weights["parameters"] == weights["active_parameters"] == 134_515_008
    assert {kind["type"]: kind["tensors"] for kind in weights["types"]} == {
        "Q4_1": 210,
        "Q8_0": 1,
        "F32": 61,
    }
    assert weights["bytes"] == sum(kind["bytes"] for kind in weights["types"])
    assert weights["unused"]["tensors"] == 0
    assert report["engine"]["kv_bytes_per_token"] == 2 * 30 * 3 * 64 * 2
    assert "quantized weights" in report["engine"]["path"]
    assert report["stop_ids"][0] == {"id": 2, "text": "<|im_end|>"}
    assert all(each["there"] for each in report["capabilities"].values())


def test_dtype_file_compiler_and_device_change_the_way_and_a_type_that_is_not_read_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = resolve("demo")
    found, cpu = outline.outline(files), torch.device("cpu")
    exact = outline.way(files, found, cpu, torch.float32, is_exact=True)
    assert exact.path == "compiled CPU steps"
    assert "float32 was asked for" in exact.reasons[0]
    entry = found.taken["model.layers.3.mlp.down_proj.weight"]
    found.taken["model.layers.3.mlp.down_proj.weight"] = entry._replace(type="F16")
    plain = outline.way(files, found, cpu, torch.bfloat16, is_exact=False)
    assert "blk.3.ffn_down.weight is not quantized" in plain.reasons[0]
    monkeypatch.setattr("shutil.which", lambda _: None)
    without = outline.way(files, found, cpu, torch.bfloat16, is_exact=False)
    assert without.path == "torch operators"
    assert "no C++ compiler" in without.reasons[0]
    cuda = outline.way(files, found, torch.device("cuda"), torch.bfloat16, is_exact=False)
    assert cuda.path.startswith("recorded decode steps")
    decoders = {kind: each for kind, each in DECODERS.items() if kind != GgmlType.Q4_1}
    monkeypatch.setattr(outline, "DECODERS", decoders)
    problem = outline.outline(files).problem
    assert problem is not None
    assert "is of type Q4_1; read are BF16, F16, F32" in problem


def test_lines_say_the_same_and_what_no_layer_takes(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(directory / FILE)
    extra = {"vision.patch.weight": next(iter(tensors.values())).clone()}
    save_file(tensors | extra, directory / FILE)
    assert run(["inspect", str(directory), "--device", "cpu"]) == 0
    words = capsys.readouterr().out
    for line in ("architecture  qwen3, 2 layers of 32", "not taken     1 tensors", "stop ids"):
        assert line in words


@pytest.mark.parametrize(
    ("form", "words", "numbers"),
    [
        ("awq-32", "awq, 4 bits, groups of 32, zero points: 14 matrices", 4),
        ("gptq-4-order", "groups of 32, inputs in order of activation: 14 matrices", 4),
        ("fp8-block", "fp8, 8 bits, blocks of 40 x 48: 14 matrices", 8),
        ("ct-fp8-channel", "8 bits, scales of rows or whole matrices: 14 matrices", 8),
        ("ct-int8-channel", "8 bits, scales of rows or whole matrices: 14 matrices", 8),
        ("mlx-4", "mlx, 4 bits, groups of 32, mode affine: 14 matrices", 4),
        ("mlx-6", "mlx, 6 bits, groups of 32, mode affine: 14 matrices", 6),
    ],
)
def test_a_quantized_checkpoint_is_understood(
    form: str, words: str, numbers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "source").mkdir()
    write_tiny_model(tmp_path / "source", TinySizes(304, 32, 64, 2, 4, 2, 16, 128))
    small, plain = publish(tmp_path / "source", FORMS[form], tmp_path / "made")
    write_tokenizer(small)
    write_tokenizer(plain)
    status, report = report_of(capsys, str(small))
    _, expected = report_of(capsys, str(plain))
    assert (status, report["error"], expected["quantization"]) == (0, None, None)
    assert report["quantization"]["bits"] == numbers
    assert report["quantization"]["matrices"] == 14
    assert report["quantization"]["plain"]["names"] == [EMBEDDING]
    assert report["weights"]["parameters"] == expected["weights"]["parameters"]
    assert report["weights"]["bytes"] < expected["weights"]["bytes"]
    assert report["weights"]["unused"]["tensors"] == 0
    assert report["fingerprints"]["weights"] != expected["fingerprints"]["weights"]
    assert run(["inspect", str(small), "--device", "cpu"]) == 0
    told = capsys.readouterr().out
    assert words in told
    assert f"left plain    1 matrices: {EMBEDDING}\n" in told


def test_a_family_that_a_faster_way_does_not_know_is_said(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("invariant_gap", "recorded_gap"):
        monkeypatch.setattr(capabilities, name, lambda _: "it has experts")
    monkeypatch.setattr(outline, "compiled_gap", lambda _: "it has experts")
    _, report = report_of(capsys, str(directory))
    assert report["engine"]["path"] == "torch operators"
    assert report["capabilities"]["batch_invariant"] == {
        "there": False,
        "why_not": "it has experts",
    }
    run(["inspect", str(directory), "--device", "cpu"])
    assert "cannot        batch invariant: it has experts" in capsys.readouterr().out


def test_a_missing_tensor_is_named_and_the_status_is_3(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(directory / FILE)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, directory / FILE)
    status, report = report_of(capsys, str(directory))
    assert (status, report["error"]["type"]) == (3, "model_files_error")
    assert "model.layers.1.mlp.down_proj.weight" in report["error"]["message"]
    assert report["architecture"] == "qwen3", "what is known is told all the same"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "unknown architecture 'MixtralForCausalLM'"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantized ('hqq')"),
        ({"hidden_size": 64}, "the configuration says"),
    ],
)
def test_what_cannot_be_served_ends_with_the_words_of_serve(
    change: dict[str, Any], words: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | change))
    status, report = report_of(capsys, str(directory))
    assert (status, report["error"]["type"]) == (3, "model_files_error")
    assert words in report["error"]["message"]


def test_nothing_there_and_a_device_that_cannot_be_used(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert report_of(capsys, "/nowhere/at/all")[0] == 3
    monkeypatch.setattr(Machine, "nvidia_driver", lambda _: "500.1")
    monkeypatch.setattr(Machine, "cuda_works", lambda _: False)
    assert run(["inspect", str(directory), "--json"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert "NVIDIA driver 500.1" in report["error"]["message"]
    assert (report["layers"], report.get("engine")) == (2, None)
    assert run(["inspect"]) == 2
    assert run(["inspect", str(directory), "--device", "tpu"]) == 2


def test_the_heads_command_hands_over_arguments_and_status(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def child(command: list[str], *, check: bool) -> subprocess.CompletedProcess[bytes]:
        asked.append(command[2:])
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(subprocess, "run", child)
    done = CliRunner().invoke(head_inspect, ["demo", "--json", "--dtype", "float32"])
    assert done.exit_code == 3
    flags = ["--device=auto", "--dtype=float32", "--json"]
    assert asked == [["superfluid_noded.cli", "inspect", *flags, "--", "demo"]]
