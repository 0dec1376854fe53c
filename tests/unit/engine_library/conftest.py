"""A tiny random Llama as safetensors and as GGUF, and the same engine over each library that is installed.

Nothing here needs transformers: the checkpoint is written by hand.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from superfluid_core.clock import SystemClock
from superfluid_core.engine.foreign.engine import LibraryEngine
from superfluid_core.engine.sim import NumberedTexts
from superfluid_core.engine.torch.build import TorchOptions, build_torch_engine
from superfluid_core.engine.torch.engine import TorchEngine
from superfluid_core.grammar.compiler import Grammars, vocabulary_of
from tests.unit.engine_torch.conftest import Files, files_of

VOCABULARY = 1024
WINDOW = 512
TEXTS = NumberedTexts(VOCABULARY)
LIBRARIES = ("llamacpp", "mlx")
MODULES = {"llamacpp": ("xllamacpp",), "mlx": ("mlx", "mlx_lm")}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": WINDOW,
    "rope_parameters": {"rope_type": "default", "rope_theta": 30_000.0},
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


class PathFiles(Files):
    """The files, under the text fingerprint that a test's head expects."""

    def text_fingerprint(self) -> str:
        return "fake-text"


def write_checkpoint(folder: Path, **changes: Any) -> Path:
    """A random model; matrices are large enough that no two ids are equally likely."""
    config = CONFIG | changes
    width, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes = {"model.embed_tokens": (VOCABULARY, width), "lm_head": (VOCABULARY, width)}
    for layer in range(config["num_hidden_layers"]):
        within = f"model.layers.{layer}."
        shapes |= {f"{within}self_attn.{one}_proj": (size, width) for one, size in (("q", heads), ("k", kv), ("v", kv))}  # fmt: skip
        shapes[f"{within}self_attn.o_proj"] = (width, heads)
        shapes |= {f"{within}mlp.{one}_proj": (inner, width) for one in ("gate", "up")}
        shapes[f"{within}mlp.down_proj"] = (width, inner)
    norms = ("input_layernorm", "post_attention_layernorm")
    generator = torch.Generator().manual_seed(17)
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator) * 0.15
        for name, shape in shapes.items()
    }
    for layer in range(config["num_hidden_layers"]):
        for norm in norms:
            tensors[f"model.layers.{layer}.{norm}.weight"] = _norm(width, generator)
    tensors["model.norm.weight"] = _norm(width, generator)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def _norm(width: int, generator: torch.Generator) -> torch.Tensor:
    return 1 + 0.2 * torch.randn(width, generator=generator)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny-llama") / "model")


@pytest.fixture(scope="session")
def gguf_file(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.unit.engine_torch.family_gguf import write_family

    target = tmp_path_factory.mktemp("tiny-gguf") / "tiny.gguf"
    write_family(checkpoint, "mistral", target)
    return target


def need(library: str) -> None:
    """Skip where the optional extra is not installed."""
    for module in MODULES[library]:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"the extra {library} is not installed: no {module}")


def grammars() -> Grammars:
    return Grammars(lambda: vocabulary_of(TEXTS, VOCABULARY))


def build(library: str, path: Path, **options: Any) -> LibraryEngine:
    """Make an engine that computes in float32, on one thread where that can be said."""
    need(library)
    found = files_of(path)
    config = replace(found.config, eos_ids=TEXTS.eos_ids)
    files = PathFiles(found.kind, found.path, config)
    chosen: dict[str, Any] = {"dtype": "float32", "lanes": 4, "device": "cpu"} | options
    if library == "llamacpp":
        from superfluid_core.engine.llamacpp.build import LlamaOptions, build_llama_engine

        made = LlamaOptions(**({"threads": 1} | chosen))
        return build_llama_engine(files, made, SystemClock(), grammars(), lambda _text: None)
    from superfluid_core.engine.mlx.build import MlxOptions, build_mlx_engine

    return build_mlx_engine(files, MlxOptions(**chosen), SystemClock(), grammars())


Make = Callable[..., LibraryEngine]


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    need(name)
    return name


@pytest.fixture
def make(library: str, request: pytest.FixtureRequest) -> Iterator[Make]:
    """Make engines of the library over the tiny model; they are closed afterwards."""
    path: Path = request.getfixturevalue("gguf_file" if library == "llamacpp" else "checkpoint")
    made: list[LibraryEngine] = []

    def one(**options: Any) -> LibraryEngine:
        made.append(build(library, path, **options))
        return made[-1]

    yield one
    for engine in made:
        engine.close()


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> TorchEngine:
    """Our own engine over the same numbers."""
    options = TorchOptions(device="cpu", dtype="float32", threads=1, lanes=4, kv_blocks=128)
    return build_torch_engine(files_of(checkpoint), options, grammars=grammars())
