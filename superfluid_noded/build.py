"""Makes the engine that the configuration names, from the model's files.

Blocking and slow: the server calls it in a thread of its own. torch is imported here and nowhere else in the node, and only
for `--engine native`. Errors are words for a person: ConfigError for what was asked, ModelFilesError for what the model lacks.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass, replace

from superfluid_core.clock import Clock
from superfluid_core.engine.base import Engine, EngineInfo
from superfluid_core.engine.script import Script, load_script
from superfluid_core.engine.sim import SimEngine, SimOptions, ThreadPause
from superfluid_core.errors import ConfigError, ModelFilesError
from superfluid_core.limits import MIB
from superfluid_core.modelfiles.resolve import ModelFiles, resolve
from superfluid_core.modelfiles.tokenizer import Tokenizer
from superfluid_core.scheduler.scheduler import PoolShape, Scheduler
from superfluid_noded.config import NodeConfig

SCRIPT_BYTES_MAX = 16 * MIB
MOCK_BLOCK_TOKENS = 16
MOCK_STEP_TOKENS = 512
CRASH_STATUS = 70
NATIVE_INSTALL = "pip install 'superfluid-fleet[node]'"


@dataclass(frozen=True, slots=True)
class Model:
    """What was found before any weight is read."""

    files: ModelFiles
    names: tuple[str, ...]
    window: int


@dataclass(frozen=True, slots=True)
class Built:
    """An engine that is ready to run, and what else its node says about itself."""

    engine: Engine
    info: EngineInfo
    text_files: dict[str, bytes]


def find_model(config: NodeConfig) -> Model:
    """Find and read everything of the model but its weights. Raises ModelFilesError or ConfigError."""
    if config.engine == "native" and importlib.util.find_spec("torch") is None:
        raise ConfigError(f"--engine native needs torch: {NATIVE_INSTALL}")
    files = resolve(config.model, offline=config.offline, token=config.around.hub_token)
    window = files.config.window
    if config.max_context is not None:
        if config.max_context > window:
            text = f"--max-context {config.max_context}: the model has at most {window}"
            raise ConfigError(text)
        window = config.max_context
    files.tokenizer()  # a node without it could not be asked for it; and a broken one is better known now
    return Model(files, config.names or (files.name,), window)


def check_engine(config: NodeConfig, model: Model) -> str:
    """Validate what can be without weights; returns the engine in a few words."""
    if config.engine == "mock":
        script = _script(config, model.files.tokenizer())
        lines = 0 if script is None else len(script)
        rates = config.mock.rates
        return f"mock (prefill {rates.prefill:g}/s, decode {rates.decode:g}/s, {lines} scripted answers)"
    return f"native (device {config.device}, dtype {config.dtype})"


def build_engine(config: NodeConfig, model: Model, clock: Clock) -> Built:
    """Load the weights and make the engine."""
    engine = (
        _mock(config, model, clock) if config.engine == "mock" else _native(config, model, clock)
    )
    info = engine.describe()
    if config.step_tokens is not None:
        info = replace(info, step_tokens=config.step_tokens)
    return Built(engine, info, model.files.text_files())


def build_scheduler(config: NodeConfig, info: EngineInfo, prefix_salt: bytes) -> Scheduler:
    """Make the scheduler that fits the engine."""
    limits = replace(config.scheduler, lanes=info.lanes, step_tokens=info.step_tokens)
    pool = PoolShape(info.block_tokens, info.blocks, info.window)
    return Scheduler(limits, pool, prefix_salt=prefix_salt, cuts_are_free=info.cuts_are_free)


def _native(config: NodeConfig, model: Model, clock: Clock) -> Engine:
    from superfluid_core.engine.torch.engine import TorchOptions, build_torch_engine

    options = TorchOptions(
        device=config.device,
        dtype=config.dtype,
        lanes=config.max_batch,
        window=model.window,
        kv_blocks=config.kv_blocks,
        kv_memory_bytes=config.kv_memory_bytes,
        threads=config.threads,
        step_tokens=config.step_tokens,
    )
    return build_torch_engine(model.files, options, clock)


def _mock(config: NodeConfig, model: Model, clock: Clock) -> Engine:
    if config.kv_memory_bytes is not None:
        raise ConfigError("--kv-memory: the mock engine has no memory to fill; use --kv-blocks")
    tokenizer = model.files.tokenizer()
    enough = config.max_batch * -(-model.window // MOCK_BLOCK_TOKENS)
    options = SimOptions(
        window=model.window,
        lanes=config.max_batch,
        block_tokens=MOCK_BLOCK_TOKENS,
        blocks=config.kv_blocks or enough,
        step_tokens=config.step_tokens or MOCK_STEP_TOKENS,
        prefill_rate=config.mock.rates.prefill,
        decode_rate=config.mock.rates.decode,
        seed=config.mock.seed,
        eos_probability=config.mock.eos,
        text_fingerprint=model.files.text_fingerprint(),
    )
    script = _script(config, tokenizer)
    return SimEngine(tokenizer, options, clock, pause=ThreadPause(), script=script, crash=_crash)


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
