"""From a checkpoint and an operator's wishes to an engine that runs.

Owns the order of what happens at start: device and numbers are chosen, weights placed, an attention backend proven, the memory that steps
need measured, the pool made of what is left, decode steps recorded. What an operator is told meanwhile goes to `say`; where a
thing is logged is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from superfluid_core.clock import Clock, SystemClock
from superfluid_core.engine.base import Capabilities, EngineInfo
from superfluid_core.engine.torch import own_kernels
from superfluid_core.engine.torch.attention.base import AttentionShape, Site
from superfluid_core.engine.torch.attention.choose import AUTO, choose_attention
from superfluid_core.engine.torch.attention.registry import DEFAULT, make_attention
from superfluid_core.engine.torch.capabilities import invariant_gap, recorded_gap
from superfluid_core.engine.torch.cuda.devices import use_device
from superfluid_core.engine.torch.cuda.graphs import OnProgress
from superfluid_core.engine.torch.cuda.memory import NO_RESERVE, UTILIZATION
from superfluid_core.engine.torch.cuda.setup import SPARE_BLOCKS, GraphSetup, recording_gap
from superfluid_core.engine.torch.device import (
    Machine,
    PoolWish,
    choose_blocks,
    choose_device,
    choose_dtype,
)
from superfluid_core.engine.torch.engine import Paths, TorchEngine
from superfluid_core.engine.torch.forward import Surrounding, build_ahead, make_compiled
from superfluid_core.engine.torch.invariant import InvariantForward
from superfluid_core.engine.torch.keeping import AUTO as AUTO_WEIGHTS
from superfluid_core.engine.torch.keeping import DEQUANTIZED, QUANTIZED, choose_products
from superfluid_core.engine.torch.kvcache import CopyCost, KvPool, KvShape, copy_cost
from superfluid_core.engine.torch.models import Decoder
from superfluid_core.engine.torch.parallel.group import (
    BUILD_SECONDS,
    COLLECTIVE_SECONDS,
    Ranks,
)
from superfluid_core.engine.torch.parallel.shards import load_shard, local_config
from superfluid_core.engine.torch.pooling import PASS_TOKENS, Pooler
from superfluid_core.engine.torch.quantized_linear import Keeper
from superfluid_core.engine.torch.weights import Checkpoint, Loaded, load_cached, load_weights
from superfluid_core.engine.torch.weights_cache import WeightsCache, cache_name
from superfluid_core.errors import ConfigError, EngineError
from superfluid_core.grammar.compiler import Grammars
from superfluid_core.limits import MIB
from superfluid_core.modelfiles.config import ModelConfig
from superfluid_core.session import Determinism

CODE_VERSION = "4"  # changes whenever the same weights would give other numbers
STEP_TOKENS = {"cpu": 512, "cuda": 2048}
KEPT = ", weights kept quantized"
POOLING = {"flashinfer": "padded"}  # a backend with a workspace of its own is too dear for one text
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """What an operator may say about this engine; None leaves it to the machine. `graphs`: decode steps are recorded."""

    device: str = "auto"
    dtype: str = "auto"
    lanes: int = 8
    window: int | None = None
    kv_blocks: int | None = None
    kv_memory_bytes: int | None = None
    block_tokens: int = 16
    threads: int | None = None
    step_tokens: int | None = None
    attention: str = AUTO
    gpu_memory_utilization: float = UTILIZATION
    graphs: bool | None = None
    weights: str = AUTO_WEIGHTS
    """auto, quantized or dequantized: whether quantized weights stay so; see keeping.py."""
    ranks: Ranks | None = None
    """The ranks that this engine is one of; see parallel/."""
    cache_dir: Path | None = None
    """Where compiled ops and dequantized weights are kept; None: nothing is compiled, nothing kept."""


def ignore(_text: str) -> None:
    """Say nothing to nobody."""


def build_torch_engine(
    files: Checkpoint,
    options: TorchOptions,
    clock: Clock | None = None,
    machine: Machine | None = None,
    grammars: Grammars | None = None,
    say: Say = ignore,
) -> TorchEngine:
    """Load a model and make its engine, telling `say` of what takes long or was passed over.

    Raises ConfigError, EngineError or ModelFilesError with words for a person.
    """
    machine = machine or Machine()
    try:
        return _build(files, options, clock or SystemClock(), machine, grammars, say)
    except RuntimeError as error:
        raise EngineError(f"{machine.about()}: {str(error).splitlines()[0][:200]}") from error


def _build(
    files: Checkpoint,
    options: TorchOptions,
    clock: Clock,
    machine: Machine,
    grammars: Grammars | None,
    say: Say,
) -> TorchEngine:
    ranks = options.ranks
    config = _share(files.config, ranks)
    device = choose_device(options.device, machine)
    dtype = choose_dtype(options.dtype, config, device, machine)
    window = config.window if options.window is None else options.window
    if not 1 <= window <= config.window:
        raise ConfigError(f"a window of {window} tokens; this model has at most {config.window}")
    use_device(device)
    threads = options.threads or machine.threads()
    torch.set_num_threads(threads)
    cache = options.cache_dir if device.type == "cpu" and not (options.graphs or ranks) else None
    build_ahead(cache, clock, say)
    with torch.inference_mode():
        loaded = _load(files, window, Placed(device, dtype, options), cache, say)
        decoder = Decoder(config, loaded.plain)
    shape = attention_shape(config)
    site = Site(device, dtype, options.block_tokens, shape)
    name = choose_attention(
        options.attention, site, lambda *why: say("passed over {}: {}".format(*why))
    )
    step_tokens = options.step_tokens or STEP_TOKENS[device.type]
    setup = GraphSetup(
        decoder, site, name, _one_block(config, options, dtype), options.lanes, window, step_tokens
    )
    is_recorded = _is_recorded(config, options, setup, say)
    with torch.inference_mode():
        pool = _make_pool(setup, options, machine, is_recorded=is_recorded)
        graphs = setup.record(pool, _progress(say)) if is_recorded else None
    attention = make_attention(name, pool, shape)
    around = Surrounding(clock, say)
    wanted = cache if name == DEFAULT else None
    compiled = make_compiled(wanted, decoder, (pool, shape), loaded.quantized, around)
    with torch.inference_mode():
        invariant = InvariantForward(decoder, pool, shape)
        is_invariant = invariant_gap(config) is None and _agreed(ranks, holds=invariant.holds())
        host_copy = copy_cost(pool, clock)
    capabilities = Capabilities(
        swap=True,
        batch_invariant=is_invariant,
        structured_output=grammars is not None,
        embeddings=ranks is None,
    )
    about = name if compiled is None else compiled.about
    found = Found(f"{about}{loaded.kept}", capabilities, host_copy, is_recorded)
    info = _info(files, options, setup, pool, found)
    passes = min(info.step_tokens, PASS_TOKENS[device.type])
    pooler = Pooler(decoder, pool.shape, device, POOLING.get(name, name), shape, passes)
    paths = Paths(decoder, attention, invariant if is_invariant else None, pooler, graphs, compiled)
    return TorchEngine(info, paths, pool, threads, clock, grammars)


class Found(NamedTuple):
    """What was found out while the engine was made. `path` says in a word or two how plain steps are computed."""

    path: str
    capabilities: Capabilities
    host_copy: CopyCost
    is_recorded: bool


def _info(
    files: Checkpoint, options: TorchOptions, setup: GraphSetup, pool: KvPool, found: Found
) -> EngineInfo:
    site, invariant = setup.site, found.capabilities.batch_invariant
    kind = str(site.dtype).removeprefix("torch.")
    return EngineInfo(
        weights_fingerprint=files.weights_fingerprint(),
        text_fingerprint=files.text_fingerprint(),
        engine_build=f"torch {torch.__version__} {kind} {site.device.type} {found.path} code {CODE_VERSION}",
        dtype=kind,
        device=str(site.device),
        vocabulary=files.config.vocabulary,
        eos_ids=files.config.eos_ids,
        window=setup.window,
        lanes=options.lanes,
        block_tokens=options.block_tokens,
        blocks=pool.shape.blocks - (SPARE_BLOCKS if found.is_recorded else 0),
        step_tokens=setup.step_tokens,
        determinism=Determinism.BATCH_INVARIANT if invariant else Determinism.NONE,
        capabilities=found.capabilities,
        kv_bytes_per_token=pool.shape.block_bytes // options.block_tokens,
        host_copy_bytes_per_s=found.host_copy.bytes_per_s,
        host_copy_overhead_ns=found.host_copy.overhead_ns,
    )


def attention_shape(config: ModelConfig) -> AttentionShape:
    """Say what a model's attention looks like to a backend."""
    return AttentionShape(
        config.heads,
        config.kv_heads,
        config.head_dim,
        config.sliding_window,
        config.attention_soft_cap,
        config.full_layers,
    )


def _is_recorded(config: ModelConfig, options: TorchOptions, setup: GraphSetup, say: Say) -> bool:
    """Whether decode steps are recorded: where that is wanted, and the model and the device let them.

    Also where ranks meet after loading, which takes one of them longer than another.
    """
    site = setup.site
    if site.device.type == "cuda" and (broken := own_kernels.gap()) is not None:
        say(f"passes between products are plain torch's: our own kernels do not run, {broken}")
    is_wanted = site.device.type == "cuda" if options.graphs is None else options.graphs
    gap = recorded_gap(config)
    if gap is None and options.graphs is None:
        gap = recording_gap(setup.attention, site)
    if is_wanted and gap is not None:
        say(f"decode steps are not recorded: {gap}")
    return _agreed(options.ranks, holds=is_wanted and gap is None, seconds=BUILD_SECONDS)


def _share(config: ModelConfig, ranks: Ranks | None) -> ModelConfig:
    return config if ranks is None else local_config(config, ranks.world)


def _agreed(ranks: Ranks | None, *, holds: bool, seconds: float = COLLECTIVE_SECONDS) -> bool:
    """Say whether something holds on every rank; the others are waited for so long."""
    return holds if ranks is None else bool(ranks.least(int(holds), seconds))


class Placed(NamedTuple):
    """Where weights go, as what, and what was wished of them."""

    device: torch.device
    dtype: torch.dtype
    options: TorchOptions


def _load(files: Checkpoint, window: int, placed: Placed, cache: Path | None, say: Say) -> Loaded:
    """Read the weights; what of them stays quantized is as `--weights` says, or nothing in float32 on a CPU."""
    device, dtype, options = placed
    products = choose_products(options.weights, device, dtype, say)
    if not _agreed(options.ranks, holds=products is not None, seconds=BUILD_SECONDS):
        products = None  # ranks have to have the same numbers
    if products is None and cache is not None and files.kind == "gguf":
        folder = cache / "weights"
        if not WeightsCache(folder).holds(cache_name(Path(files.path), dtype)):
            say("dequantizing the weights, once: they are kept for the next start")
        loaded = load_cached(files, window, dtype, folder)
        is_plain = options.dtype == "float32" or options.weights == DEQUANTIZED
        return loaded._replace(quantized=None) if is_plain else loaded
    keeper = None if products is None else Keeper(products, device, dtype)
    if options.ranks is None:
        plain = load_weights(files, window, device, dtype, keeper)
    else:
        plain = load_shard(files, window, dtype, options.ranks, keeper)
    if keeper is not None and keeper.matrices:
        keeper.warm()
        say(f"{keeper.matrices} matrices stay quantized, {keeper.bytes / MIB:.0f} MiB")
        return Loaded(plain, kept=KEPT)
    if options.weights == QUANTIZED:
        raise ConfigError("--weights quantized: none of this model's matrices can be kept so")
    return Loaded(plain)


def _progress(say: Say) -> OnProgress:
    return lambda done, total: say(f"recorded decode steps: {done} of {total} sizes")


def _one_block(config: ModelConfig, options: TorchOptions, dtype: torch.dtype) -> KvShape:
    return KvShape(
        layers=config.layers,
        blocks=1,
        block_tokens=options.block_tokens,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
    )


def _make_pool(
    setup: GraphSetup, options: TorchOptions, machine: Machine, *, is_recorded: bool
) -> KvPool:
    """Size the pool after the weights are placed, then make it."""
    one, device = setup.one, setup.site.device
    is_told = options.kv_blocks is not None or options.kv_memory_bytes is not None
    is_measured = device.type == "cuda" and not is_told
    if device.type == "cuda" and is_told:
        setup.warm()
    wish = PoolWish(
        block_bytes=one.block_bytes,
        block_tokens=options.block_tokens,
        tokens_useful=options.lanes * setup.window,
        blocks=options.kv_blocks,
        memory_bytes=options.kv_memory_bytes,
        reserve=setup.reserve(is_recorded=is_recorded) if is_measured else NO_RESERVE,
        utilization=options.gpu_memory_utilization,
    )
    blocks = choose_blocks(wish, device, machine)
    blocks = blocks if options.ranks is None else options.ranks.least(blocks)
    blocks += SPARE_BLOCKS if is_recorded else 0
    return KvPool(replace(one, blocks=blocks), device)
