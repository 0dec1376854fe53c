"""From a directory of safetensors and an operator's wishes to an engine over MLX.

Owns what is decided at start: device, numbers, the size of the pool; and the proof that a model can be run as this engine does, on a
prompt and on two lanes side by side, before anything is promised. What type keys and values have is seen in that proof: weights that
MLX quantized compute in the type of their scales, those of its float modes in what MLX makes of bfloat16 and the norms. Models whose state is not plain keys and values are refused by
name, and so are checkpoints that bring code of their own.
"""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models.cache as mlx_cache
import torch
from mlx_lm.utils import load_model

from superfluid_core.clock import Clock
from superfluid_core.engine.base import Capabilities, EngineInfo
from superfluid_core.engine.compose import StepRow
from superfluid_core.engine.foreign.engine import LibraryEngine
from superfluid_core.engine.mlx.pool import BlockPool
from superfluid_core.engine.mlx.runner import MlxLibrary
from superfluid_core.engine.torch.device import Machine, PoolWish, choose_blocks
from superfluid_core.engine.torch.weights import Checkpoint
from superfluid_core.errors import ConfigError, EngineError
from superfluid_core.grammar.compiler import Grammars
from superfluid_core.modelfiles.config import ModelConfig, config_to_hf
from superfluid_core.scheduler.plan import LanePlan, TickPlan
from superfluid_core.session import Determinism

CODE_VERSION = "1"  # changes whenever the same weights would give other numbers
STEP_TOKENS = 512
PROOF_TOKENS = 3
_OWN = ("architectures", "model_type", "dtype", "rope_parameters", "layer_types", "sliding_window", "use_sliding_window")  # fmt: skip
"""What a file says itself or not at all: adding it would make another model."""


@dataclass(frozen=True, slots=True)
class MlxOptions:
    """What an operator may say about this engine; None leaves it to the machine."""

    device: str = "auto"
    dtype: str = "auto"
    lanes: int = 8
    window: int | None = None
    kv_blocks: int | None = None
    kv_memory_bytes: int | None = None
    block_tokens: int = 16
    step_tokens: int | None = None


def build_mlx_engine(
    files: Checkpoint, options: MlxOptions, clock: Clock, grammars: Grammars | None
) -> LibraryEngine:
    """Load a model and make its engine. Raises ConfigError, EngineError or ModelFilesError with words for a person."""
    if files.kind != "hf":
        raise ConfigError(
            "--engine mlx reads directories of safetensors; for a .gguf file there is --engine llamacpp"
        )
    config = files.config
    if config.quantization is not None and config.quantization.layout != "mlx":
        raise ConfigError(
            "--engine mlx reads plain safetensors and those that MLX quantized; these are quantized "
            f"otherwise ({config.quantization.method})"
        )
    window = config.window if options.window is None else options.window
    if not 1 <= window <= config.window:
        raise ConfigError(f"a window of {window} tokens; this model has at most {config.window}")
    if (
        config.rope_scaling.kind == "longrope"
        and window <= config.rope_scaling.original_max_position
    ):
        raise ConfigError(
            "--engine mlx: mlx-lm has only the long factors of this model's rotary scaling"
        )
    device = _device(options.device)
    with mx.stream(device):
        model = _load(Path(files.path), config, options.dtype)
    windows = _windows(model)
    _check_windows(windows, config, window)
    shape = (options.block_tokens, config.vocabulary, device)
    trial = BlockPool(windows, 1, options.block_tokens)
    _prove(MlxLibrary(model, trial, *shape), config.vocabulary)
    dtype = trial.dtype()
    token_bytes = 2 * config.layers * config.kv_heads * config.head_dim * dtype.size
    wish = PoolWish(
        block_bytes=options.block_tokens * token_bytes,
        block_tokens=options.block_tokens,
        tokens_useful=options.lanes * window,
        blocks=options.kv_blocks,
        memory_bytes=options.kv_memory_bytes,
    )
    blocks = choose_blocks(wish, torch.device("cpu"), Machine())
    pool = BlockPool(windows, blocks, options.block_tokens)
    library = MlxLibrary(model, pool, *shape)
    _prove(library, config.vocabulary)  # once more, where all of the pool's memory is taken
    kind = str(dtype).removeprefix("mlx.core.")
    info = EngineInfo(
        weights_fingerprint=files.weights_fingerprint(),
        text_fingerprint=files.text_fingerprint(),
        engine_build=f"mlx {_versions()} {kind} {device.type.name} code {CODE_VERSION}",
        dtype=kind,
        device=device.type.name,
        vocabulary=config.vocabulary,
        eos_ids=config.eos_ids,
        window=window,
        lanes=options.lanes,
        block_tokens=options.block_tokens,
        blocks=blocks,
        step_tokens=options.step_tokens or max(STEP_TOKENS, options.lanes + 1),
        determinism=Determinism.NONE,
        capabilities=Capabilities(structured_output=grammars is not None),
        kv_bytes_per_token=token_bytes,
    )
    return LibraryEngine(info, library, clock, grammars)


def _versions() -> str:
    return f"{importlib.metadata.version('mlx')} mlx-lm {importlib.metadata.version('mlx-lm')}"


def _device(wanted: str) -> mx.Device:
    """Choose the GPU where this build of MLX has one."""
    if wanted not in ("auto", "cpu"):
        raise ConfigError(
            f"--device {wanted[:40]}: MLX takes auto (its GPU where it has one) or cpu"
        )
    return mx.Device(mx.cpu) if wanted == "cpu" else mx.default_device()


def _load(path: Path, config: ModelConfig, dtype: str) -> Any:
    written = json.loads((path / "config.json").read_text(encoding="utf-8"))
    if "model_file" in written:
        raise ConfigError("this checkpoint brings code of its own, which is never run")
    try:
        model, _ = load_model(path, model_config=_unwritten(written, config))
        if dtype != "auto":
            model.set_dtype(getattr(mx, dtype))
        mx.eval(model.parameters())
    except (ValueError, OSError, RuntimeError, ImportError, KeyError, TypeError) as error:
        text = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise EngineError(f"mlx-lm cannot load this {config.family} model: {text}") from error
    return model


def _unwritten(written: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Say in the names that mlx-lm reads what newer files say in others, or leave to their family's defaults.

    What it misses it takes for its own defaults without a word: rotary frequencies would be wrong.
    """
    table = {name: value for name, value in config_to_hf(config).items() if name not in _OWN}
    rope: Any = config_to_hf(config)["rope_parameters"]
    full = rope.get("full_attention", rope)
    table["rope_theta"] = full["rope_theta"]
    if full["rope_type"] != "default":
        table["rope_scaling"] = {name: full[name] for name in full if name != "rope_theta"}
    if config.local_rope_theta:
        table["rope_local_base_freq"] = config.local_rope_theta
    return {name: value for name, value in table.items() if name not in written}


def _windows(model: Any) -> list[int | None]:
    """How far back each layer sees; None for all of it. Raises ConfigError for other states than keys and values."""
    windows: list[int | None] = []
    for cache in mlx_cache.make_prompt_cache(model):
        if type(cache) is mlx_cache.KVCache:
            windows.append(None)
        elif type(cache) is mlx_cache.RotatingKVCache and not cache.keep:
            windows.append(int(cache.max_size))
        else:
            raise ConfigError(
                f"--engine mlx: this model keeps {type(cache).__name__} for a layer; only plain keys "
                "and values, windowed or not, can be kept in blocks"
            )
    return windows


def _check_windows(windows: list[int | None], config: ModelConfig, served: int) -> None:
    """Refuse a model that mlx-lm would compute without the windows that it was trained with."""
    reach = config.sliding_window
    if reach is None or served <= reach:
        return
    if windows != [None if n in config.full_layers else reach for n in range(config.layers)]:
        raise ConfigError(
            f"--engine mlx: mlx-lm does not keep to this model's window of {reach} tokens; "
            f"--max-context {reach} runs it, and so does --engine native"
        )


def _prove(library: MlxLibrary, vocabulary: int) -> None:
    """Run a prompt and two lanes at once, in block 0, which nobody holds yet."""
    lanes = [LanePlan(lane, False, 0, (0,), 1, 0, (0,)) for lane in range(2)]
    library.open(TickPlan(0, lanes, PROOF_TOKENS))
    prompt = StepRow(0, 0, (0,) * PROOF_TOKENS, False, 0, False)
    together = [StepRow(lane, PROOF_TOKENS - lane, (0,), True, 0, True) for lane in range(2)]
    try:
        library.forward([prompt])
        found = library.forward(together)
    except (EngineError, AttributeError, NotImplementedError) as error:
        raise ConfigError(f"--engine mlx: this model cannot run in lanes: {error}") from error
    if found.shape != (2, vocabulary):
        raise EngineError(
            f"the model gives {found.shape[1]} logits, its vocabulary is {vocabulary}"
        )
