"""Settings: four sources, one table, and contradictions that are told before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from superfluid_core.errors import ConfigError
from superfluid_noded.config import (
    OPTIONS,
    GpuConfig,
    NodeConfig,
    Rates,
    Surroundings,
    build_config,
    default_identity,
    parse_rates,
    read_settings,
)
from superfluid_noded.scheduling import parse_size

AROUND = Surroundings(None, None, None, "hf_secret")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in OPTIONS:
        monkeypatch.delenv(option.env, raising=False)
    monkeypatch.delenv("SUPERFLUID_CONFIG", raising=False)


def config(file: str | None = None, **flags: Any) -> NodeConfig:
    return build_config(read_settings({"model": "demo", **flags}, file), AROUND)


def test_flag_beats_environment_beats_file_beats_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "noded.toml"
    file.write_text('max-batch = 2\nmax-queue = 3\nmodel = "m"\nlisten = ["127.0.0.1:1"]\n')
    monkeypatch.setenv("SUPERFLUID_MAX_BATCH", "4")
    settings = read_settings({"max_queue": "9"}, str(file))
    assert settings["max_batch"] == (4, "env")
    assert settings["max_queue"] == (9, "flag")
    assert settings["model"] == ("m", "toml")
    assert settings["listen"] == (("127.0.0.1:1",), "toml")
    assert settings["threads"] == (None, "default")
    built = build_config(settings, AROUND)
    assert built.scheduling.limits.lanes == 4
    assert built.scheduling.limits.queue_max == 9


def test_defaults_are_those_of_the_documents() -> None:
    built = config()
    assert built.listen == (("0.0.0.0", 8454),)
    assert built.metrics == ("127.0.0.1", 8463)
    assert built.max_batch == 8
    assert built.handshake_ms == 10_000
    assert built.idle_timeout_ms == 120_000
    assert built.drain_grace_ms == 30_000
    assert built.identity.endswith("-8454")


def test_the_nth_node_of_a_host_gets_the_nth_metrics_port() -> None:
    assert config(listen=("0.0.0.0:8457",)).metrics == ("127.0.0.1", 8466)
    assert config(listen=("127.0.0.1:0",)).metrics == ("127.0.0.1", 0)
    assert config(metrics="off").metrics is None
    assert config(metrics="[::1]:9").metrics == ("::1", 9)


def test_identities_are_made_of_permitted_characters() -> None:
    assert default_identity("gpu_box 1.lan", 8454) == "gpu_box-1-8454"
    assert default_identity("", 7) == "node-7"
    assert default_identity("h", 0).startswith("h-p")


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ({"model": ""}, "--model is needed"),
        ({"engine": "llamacpp", "tensor_parallel": "2"}, "--tensor-parallel belongs to --engine native"),
        ({"engine": "mlx", "attention_backend": "triton"}, "--attention-backend belongs to --engine native"),
        ({"engine": "llamacpp", "weights": "quantized"}, "--weights belongs to --engine native"),
        ({"engine": "mlx", "threads": "2"}, "MLX chooses its threads itself"),
        ({"engine": "llamacpp", "mock_seed": "1"}, "--mock-seed belongs to --engine mock"),
        ({"engine": "magic"}, "none of native, mock, llamacpp, mlx"),
        ({"kv_blocks": "5", "kv_memory": "1GiB"}, "give one of them"),
        ({"mock_seed": "1"}, "--mock-seed belongs to --engine mock"),
        ({"max_batch": "0"}, "outside 1..1024"),
        ({"prefill_budget": "63"}, "0 \\(adaptive\\) or 64..4096"),
        ({"identity": "a b"}, "identity"),
        ({"model_name": ("bad name",)}, "model name"),
        ({"metrics": "0.0.0.0:9"}, "metrics-token-file"),
        ({"metrics": "127.0.0.1:x"}, "port"),
        ({"metrics_token_file": "/nowhere"}, "metrics-token-file"),
        ({"listen": ("host:99999",)}, "port"),
        ({"dtype": "int4"}, "none of auto"),
        ({"mock_rates": "fast", "engine": "mock"}, "prefill=N,decode=N"),
        ({"mock_eos": "2", "engine": "mock"}, "0..1"),
        ({"kv_memory": "lots"}, "not a size"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused_by_name(flags: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        config(**flags)


@pytest.mark.parametrize(
    ("text", "word"),
    [("modle = 'x'", "unknown name"), ("= 3", "configuration file"), ("max-batch = 'many'", "max-batch"),
     ("max-batch = true", "max-batch")],
)  # fmt: skip
def test_a_bad_file_is_named(tmp_path: Path, text: str, word: str) -> None:
    file = tmp_path / "noded.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=word):
        config(str(file))
    with pytest.raises(ConfigError, match="No such file"):
        config(str(tmp_path / "absent.toml"))


def test_sizes_and_rates() -> None:
    assert (
        parse_size("1073741824") == parse_size("1GiB") == parse_size("1g") == parse_size("1024 MB")
    )
    assert parse_rates("prefill=4000,decode=50") == Rates(4000, 50)
    assert parse_rates("decode=0.5") == Rates(0, 0.5)
    for bad in ("prefill=1,prefill=2", "decode=-1", "decode=nan", "decode=", "x=1"):
        with pytest.raises(ValueError, match=r"."):
            parse_rates(bad)
    for bad in ("0", "-1", "1.5G", "1X"):
        with pytest.raises(ValueError, match="size"):
            parse_size(bad)


def test_what_the_native_engine_is_told_about_a_gpu() -> None:
    assert config().gpu == GpuConfig(0.9, 16, "auto", graphs=True, ranks=1)
    told = config(
        gpu_memory_utilization="0.5",
        block_size="64",
        attention_backend="triton",
        cuda_graphs="off",
        tensor_parallel="4",
    )
    assert told.gpu == GpuConfig(0.5, 64, "triton", graphs=False, ranks=4)
    assert (told.weights, config(weights="quantized").weights) == ("auto", "quantized")
    for name, value in (
        ("gpu_memory_utilization", "0.01"),
        ("gpu_memory_utilization", "1.5"),
        ("block_size", "32"),
        ("attention_backend", "flash"),
        ("tensor_parallel", "0"),
        ("weights", "int4"),
    ):
        with pytest.raises(ConfigError, match=name.replace("_", "-")):
            config(**{name: value})


def test_metrics_off_loopback_are_allowed_with_a_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    built = config(metrics="0.0.0.0:9", metrics_token_file=str(token))
    assert built.metrics == ("0.0.0.0", 9)
    assert built.metrics_token == b"0123456789abcdef"
    token.write_text("short")
    with pytest.raises(ConfigError, match="16 characters"):
        config(metrics_token_file=str(token))


def test_secrets_of_the_surroundings_are_not_shown() -> None:
    assert "hf_secret" not in repr(config())


def test_every_option_has_one_flag_name_and_help() -> None:
    names = [option.name for option in OPTIONS]
    assert len(names) == len(set(names))
    assert all(option.help for option in OPTIONS)
