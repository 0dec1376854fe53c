"""From a GGUF file and an operator's wishes to an engine over llama.cpp.

Owns what is decided at start: where layers are, how large the cache is, what the engine says of itself. llama.cpp reads the weights as
they are in the file and picks its own kernels, so no dtype is chosen for them; `dtype` is that of the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from superfluid_core.clock import Clock
from superfluid_core.engine.base import Capabilities, EngineInfo
from superfluid_core.engine.foreign.engine import LibraryEngine
from superfluid_core.engine.llamacpp.binding import (
    KV_TYPES,
    SEQUENCES_MAX,
    Binding,
    load_binding,
)
from superfluid_core.engine.llamacpp.context import LlamaLibrary, Shape
from superfluid_core.engine.torch.device import Machine, PoolWish, choose_blocks
from superfluid_core.engine.torch.weights import Checkpoint
from superfluid_core.errors import ConfigError, EngineError
from superfluid_core.grammar.compiler import Grammars
from superfluid_core.modelfiles.config import ModelConfig
from superfluid_core.session import Determinism

CODE_VERSION = "1"  # changes whenever the same weights would give other numbers
STEP_TOKENS = {"cpu": 128, "gpu": 512}
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LlamaOptions:
    """What an operator may say about this engine; None leaves it to the machine."""

    device: str = "auto"
    dtype: str = "auto"
    lanes: int = 8
    window: int | None = None
    kv_blocks: int | None = None
    kv_memory_bytes: int | None = None
    block_tokens: int = 16
    threads: int | None = None
    step_tokens: int | None = None


def build_llama_engine(
    files: Checkpoint,
    options: LlamaOptions,
    clock: Clock,
    grammars: Grammars | None,
    say: Say,
) -> LibraryEngine:
    """Load a model and make its engine. Raises ConfigError, EngineError or ModelFilesError with words for a person."""
    if files.kind != "gguf":
        raise ConfigError("--engine llamacpp reads .gguf files; give --engine native a directory")
    if options.lanes >= SEQUENCES_MAX:
        raise ConfigError(
            f"--max-batch {options.lanes}: llama.cpp has at most {SEQUENCES_MAX - 1} lanes"
        )
    binding = load_binding()
    config, machine = files.config, Machine()
    window = config.window if options.window is None else options.window
    if not 1 <= window <= config.window:
        raise ConfigError(f"a window of {window} tokens; this model has at most {config.window}")
    device = _device(options.device, binding)
    kv_type = _kv_type(options.dtype)
    blocks = choose_blocks(_wish(config, options, window), torch.device("cpu"), machine)
    step_tokens = options.step_tokens or max(STEP_TOKENS[device], options.lanes + 1)
    shape = Shape(
        cache_tokens=blocks * options.block_tokens,
        batch_tokens=max(step_tokens, options.lanes),
        block_tokens=options.block_tokens,
        lanes=options.lanes,
        kv_type=kv_type,
        threads=options.threads or machine.threads(),
        is_offloaded=device == "gpu",
    )
    library = LlamaLibrary(binding, str(files.path), shape)
    _check_model(library, config, window)
    if not library.shares_prefixes:
        say(
            "this model has sliding windows: llama.cpp computes shared prefixes for every lane anew"
        )
    info = EngineInfo(
        weights_fingerprint=files.weights_fingerprint(),
        text_fingerprint=files.text_fingerprint(),
        engine_build=f"llama.cpp {binding.version} kv {kv_type} {device} code {CODE_VERSION}",
        dtype=kv_type,
        device=device,
        vocabulary=library.vocabulary,
        eos_ids=config.eos_ids,
        window=window,
        lanes=options.lanes,
        block_tokens=options.block_tokens,
        blocks=blocks,
        step_tokens=step_tokens,
        determinism=Determinism.NONE,
        capabilities=Capabilities(structured_output=grammars is not None),
        kv_bytes_per_token=_token_bytes(config, kv_type),
    )
    return LibraryEngine(info, library, clock, grammars)


def _check_model(library: LlamaLibrary, config: ModelConfig, served: int) -> None:
    """Refuse what llama.cpp understands otherwise than the file says."""
    reach = config.sliding_window
    if library.vocabulary != config.vocabulary:
        library.close()
        raise EngineError(
            f"llama.cpp sees {library.vocabulary} token ids, the file's tokenizer {config.vocabulary}"
        )
    if reach is not None and reach < served and not library.reach:
        library.close()
        raise ConfigError(
            f"--engine llamacpp: llama.cpp does not keep to this model's window of {reach} tokens; "
            f"--max-context {reach} runs it, and so does --engine native"
        )


def _wish(config: ModelConfig, options: LlamaOptions, window: int) -> PoolWish:
    return PoolWish(
        block_bytes=options.block_tokens * _token_bytes(config, _kv_type(options.dtype)),
        block_tokens=options.block_tokens,
        tokens_useful=options.lanes * window,
        blocks=options.kv_blocks,
        memory_bytes=options.kv_memory_bytes,
    )


def _kv_type(dtype: str) -> str:
    return "float16" if dtype == "auto" else dtype


def _token_bytes(config: ModelConfig, kv_type: str) -> int:
    return 2 * config.layers * config.kv_heads * config.head_dim * KV_TYPES[kv_type][1]


def _device(wanted: str, binding: Binding) -> str:
    """Choose the CPU, or the GPU that this build of llama.cpp was made for."""
    kind = wanted.partition(":")[0]
    if kind not in ("auto", "cpu", "cuda") or ":" in wanted:
        raise ConfigError(f"--device {wanted[:40]}: llama.cpp takes auto, cpu or cuda")
    has_gpu = bool(binding.call("llama_supports_gpu_offload"))
    if kind == "cuda" and not has_gpu:
        raise ConfigError("--device cuda: the installed llama.cpp was built without a GPU backend")
    return "gpu" if has_gpu and kind != "cpu" else "cpu"
