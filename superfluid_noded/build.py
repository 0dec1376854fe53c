"""Makes the engines that the configuration names, from the models' files: one, or two with a fill-in-the-middle model.

Blocking and slow: the server calls it in a thread of its own. torch is imported here and nowhere else in the node, and not for
`--engine mock`: other libraries' engines sample with it too. Errors are words for a person: ConfigError for what was asked, ModelFilesError for what the model lacks.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from dataclasses import dataclass, replace
from typing import TypedDict

from superfluid_core.clock import Clock
from superfluid_core.engine.base import Engine, EngineInfo
from superfluid_core.engine.script import Script, load_script
from superfluid_core.engine.sim import SimEngine, SimOptions, ThreadPause
from superfluid_core.errors import ConfigError, ModelFilesError
from superfluid_core.grammar.compiler import Grammars, vocabulary_of
from superfluid_core.kv.blocks import PoolShape
from superfluid_core.limits import MIB, SchedulerLimits
from superfluid_core.modelfiles.config import ModelConfig
from superfluid_core.modelfiles.resolve import ModelFiles, resolve
from superfluid_core.modelfiles.tokenizer import Tokenizer
from superfluid_core.scheduler.rules import Rules
from superfluid_noded.config import FIM_CONTEXT_MAX, NodeConfig

SCRIPT_BYTES_MAX = 16 * MIB
BLOCK_TOKENS = 16
MOCK_STEP_TOKENS = 512
CRASH_STATUS = 70
NATIVE_INSTALL = "pip install 'superfluid-fleet[node]'"
# what an engine imports, and what brings it
_NEEDS = {
    "native": (("torch",), NATIVE_INSTALL),
    "llamacpp": (("xllamacpp", "torch"), "pip install 'superfluid-fleet[llamacpp]'"),
    "mlx": (("mlx", "mlx_lm", "torch"), "pip install 'superfluid-fleet[mlx]'"),
}


@dataclass(frozen=True, slots=True)
class Model:
    """What was found before any weight is read. `is_second` marks the fill-in-the-middle model."""

    files: ModelFiles
    names: tuple[str, ...]
    window: int
    lanes: int
    is_second: bool = False


@dataclass(frozen=True, slots=True)
class Built:
    """An engine that is ready to run, and what else its node says about itself."""

    engine: Engine
    info: EngineInfo
    text_files: dict[str, bytes]
    grammars: Grammars | None = None


def find_models(config: NodeConfig) -> tuple[Model, ...]:
    """Find and read everything of the models but their weights, the main one first.

    Raises ModelFilesError or ConfigError.
    """
    need_modules(config.engine)
    files = _find(config, config.model)
    window = _window(files, config.max_context, "max-context")
    main = Model(files, config.names or (files.name,), window, config.max_batch)
    fim = config.fim
    if fim is None:
        return (main,)
    files = _find(config, fim.model)
    window = _window(files, fim.max_context, "fim-max-context")
    names = fim.names or (files.name,)
    double = sorted(set(names) & set(main.names))
    if double:
        raise ConfigError(f"both models are called {double[0]!r}: name one with --fim-model-name")
    return main, Model(files, names, min(window, FIM_CONTEXT_MAX), fim.max_batch, is_second=True)


def need_modules(engine: str) -> None:
    """Raise ConfigError, with the extra that brings it, for a module that `engine` needs and this environment lacks."""
    modules, install = _NEEDS.get(engine, ((), ""))
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    if absent:
        raise ConfigError(f"--engine {engine} needs {absent[0]}: {install}")


def _find(config: NodeConfig, spec: str) -> ModelFiles:
    files = resolve(spec, offline=config.offline, token=config.around.hub_token)
    files.tokenizer()  # a node without it could not be asked for it; and a broken one is better known now
    return files


def _window(files: ModelFiles, asked: int | None, flag: str) -> int:
    window = files.config.window
    if asked is None:
        return window
    if asked > window:
        raise ConfigError(f"--{flag} {asked}: the model has at most {window}")
    return asked


def check_engine(config: NodeConfig, model: Model) -> str:
    """Validate what can be without weights; returns the engine in a few words."""
    if config.engine == "mock":
        script = _script(config, model.files.tokenizer())
        lines = 0 if script is None else len(script)
        rates = config.mock.rates
        return f"mock (prefill {rates.prefill:g}/s, decode {rates.decode:g}/s, {lines} scripted answers)"
    kind = {"llamacpp": "gguf", "mlx": "hf"}.get(config.engine, model.files.kind)
    if kind != model.files.kind:
        form = "a .gguf file" if kind == "gguf" else "a directory of safetensors"
        raise ConfigError(f"--engine {config.engine} runs {form}; {model.names[0]} is none")
    return f"{config.engine} (device {config.device}, dtype {config.dtype})"


def describe_device(config: NodeConfig) -> str:
    """Say in a line what the engine would run on, and on which driver. Raises EngineError where it could not."""
    if config.engine == "mock":
        return "none: the mock engine computes nothing"
    if config.engine != "native":
        return f"{config.device}: {config.engine} finds its devices itself, when it loads the model"
    from superfluid_core.engine.torch.device import Machine, choose_device, in_words

    machine = Machine()
    return in_words(choose_device(config.device, machine), machine)


def build_engines(config: NodeConfig, models: tuple[Model, ...], clock: Clock) -> tuple[Built, ...]:
    """Load all weights. The second model comes first: the main one's KV pool takes what memory is left."""
    made = {model.names: build_engine(config, model, clock) for model in reversed(models)}
    return tuple(made[model.names] for model in models)


def build_engine(config: NodeConfig, model: Model, clock: Clock) -> Built:
    """Load the weights and make the engine."""
    grammars = _grammars(model)
    make = {"mock": _mock, "native": _native, "llamacpp": _llamacpp, "mlx": _mlx}[config.engine]
    engine = make(config, model, clock, grammars)
    info = engine.describe()
    if config.step_tokens is not None:
        info = replace(info, step_tokens=config.step_tokens)
    return Built(engine, info, model.files.text_files(), grammars)


def _grammars(model: Model) -> Grammars:
    """Prepare for constraints; the vocabulary is collected when the first one comes."""
    tokenizer = model.files.tokenizer()
    size = max(model.files.config.vocabulary, tokenizer.vocabulary)
    return Grammars(lambda: vocabulary_of(tokenizer, size))


def _blocks_enough(model: Model, block_tokens: int = BLOCK_TOKENS) -> int:
    return model.lanes * -(-model.window // block_tokens)


def scheduler_sizes(
    config: NodeConfig, info: EngineInfo
) -> tuple[SchedulerLimits, Rules, PoolShape]:
    """Fit the operator's limits and rules to an engine. A second, smaller engine has its caps cut to its lanes."""
    limits = replace(config.scheduling.limits, lanes=info.lanes, step_tokens=info.step_tokens)
    rules = config.scheduling.rules
    if info.lanes < config.scheduling.limits.lanes:
        caps = {qos: min(lanes, info.lanes) for qos, lanes in rules.class_lanes.items()}
        rules = replace(rules, class_lanes=caps, tenant_lanes=min(rules.tenant_lanes, info.lanes))
    if rules.park and not (info.capabilities.swap and info.kv_bytes_per_token):
        raise ConfigError("--park: this engine cannot move KV to host memory")
    pool = PoolShape(
        info.block_tokens,
        info.blocks,
        info.window,
        info.kv_bytes_per_token,
        info.host_copy_bytes_per_s,
        info.host_copy_overhead_ns,
    )
    return limits, rules, pool


def _native(config: NodeConfig, model: Model, clock: Clock, grammars: Grammars) -> Engine:
    from superfluid_core.engine.torch.build import TorchOptions, build_torch_engine

    options = TorchOptions(
        **_common(config, model),
        weights=config.weights,
        threads=config.threads,
        cache_dir=config.cache_dir,
        attention=config.gpu.attention,
        gpu_memory_utilization=config.gpu.memory_utilization,
        graphs=None if config.gpu.graphs else False,
    )
    say = logging.getLogger(__name__).info
    if config.gpu.ranks > 1 and not model.is_second:
        from superfluid_core.engine.torch.parallel.launch import build_parallel

        return build_parallel(model.files, options, config.gpu.ranks, clock, say)
    return build_torch_engine(model.files, options, clock, grammars=grammars, say=say)


def _llamacpp(config: NodeConfig, model: Model, clock: Clock, grammars: Grammars) -> Engine:
    from superfluid_core.engine.llamacpp.build import LlamaOptions, build_llama_engine

    options = LlamaOptions(**_common(config, model), threads=config.threads)
    say = logging.getLogger(__name__).info
    return build_llama_engine(model.files, options, clock, grammars, say)


def _mlx(config: NodeConfig, model: Model, clock: Clock, grammars: Grammars) -> Engine:
    from superfluid_core.engine.mlx.build import MlxOptions, build_mlx_engine

    options = MlxOptions(**_common(config, model))
    return build_mlx_engine(model.files, options, clock, grammars)


class _Common(TypedDict):
    """What every engine that has weights is told."""

    device: str
    dtype: str
    lanes: int
    window: int
    kv_blocks: int | None
    kv_memory_bytes: int | None
    block_tokens: int
    step_tokens: int | None


def _common(config: NodeConfig, model: Model) -> _Common:
    """Collect it. KV blocks are as told; the second model gets what its lanes can fill."""
    blocks = config.kv_blocks
    if model.is_second:
        blocks = _blocks_enough(model, config.gpu.block_tokens)
    return _Common(
        device=config.device,
        dtype=config.dtype,
        lanes=model.lanes,
        window=model.window,
        kv_blocks=blocks,
        kv_memory_bytes=None if model.is_second else config.kv_memory_bytes,
        block_tokens=config.gpu.block_tokens,
        step_tokens=config.step_tokens,
    )


def _mock(config: NodeConfig, model: Model, clock: Clock, grammars: Grammars) -> Engine:
    if config.kv_memory_bytes is not None:
        raise ConfigError("--kv-memory: the mock engine has no memory to fill; use --kv-blocks")
    tokenizer = model.files.tokenizer()
    blocks = None if model.is_second else config.kv_blocks
    options = SimOptions(
        window=model.window,
        lanes=model.lanes,
        block_tokens=BLOCK_TOKENS,
        blocks=blocks or _blocks_enough(model),
        step_tokens=config.step_tokens or MOCK_STEP_TOKENS,
        prefill_rate=config.mock.rates.prefill,
        decode_rate=config.mock.rates.decode,
        seed=config.mock.seed,
        eos_probability=config.mock.eos,
        text_fingerprint=model.files.text_fingerprint(),
        kv_bytes_per_token=config.mock.kv_bytes or _kv_bytes(model.files.config),
        grammars=grammars,
    )
    script = _script(config, tokenizer)
    return SimEngine(tokenizer, options, clock, pause=ThreadPause(), script=script, crash=_crash)


def _kv_bytes(shape: ModelConfig) -> int:
    """Bytes of KV that one token of this model has: a key and a value per layer and KV head, in 16 bits."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * 2


def _script(config: NodeConfig, tokenizer: Tokenizer) -> Script | None:
    path = config.mock.script
    if path is None:
        return None
    try:
        with path.open("rb") as stream:
            data = stream.read(SCRIPT_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"--mock-script: {error.strerror or 'cannot be read'}") from None
    if len(data) > SCRIPT_BYTES_MAX:
        raise ConfigError(f"--mock-script: larger than {SCRIPT_BYTES_MAX} bytes")
    try:
        return load_script(data.decode(), tokenizer)
    except UnicodeDecodeError:
        raise ConfigError("--mock-script: not UTF-8") from None
    except ModelFilesError as error:
        raise ConfigError(f"--mock-script: {error.message}") from None


def _crash() -> None:
    """End the process as a crash would: nothing is flushed, nobody is told."""
    sys.stderr.flush()
    os._exit(CRASH_STATUS)
