"""Checks of whole engines: the same sessions on different ways to compute them must say the same.

Owns what is compared: eager against recorded steps, lane by lane against company, a device against the CPU, KV before and after it was
parked. Everything runs in float32, where different ways to add differ too little to change a choice, and again in
the model's own numbers where only moved bits are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from superfluid_core.engine.base import Engine
from superfluid_core.engine.torch.build import TorchOptions, build_torch_engine
from superfluid_core.engine.torch.drive import Driver
from superfluid_core.engine.torch.kvcache import KvPool, KvShape
from superfluid_core.engine.torch.selftest.model import TinyModel, TinySizes, write_tiny_model
from superfluid_core.engine.torch.selftest.report import Check, Found, near, run_check
from superfluid_core.limits import MIB
from superfluid_core.session import SamplingParams

PROMPT_LENGTHS = (1, 40, 130, 17)
OUTPUTS = 24
BLOCKS = 128
PARKED_BLOCKS = 7
PARK_BYTES = 96 * MIB
BOUND = 1e-3


def engine_checks(device: torch.device, directory: Path, sizes: TinySizes) -> Iterator[Check]:
    """Try engines over a small random model, which is written into `directory`."""
    files = write_tiny_model(directory, sizes)
    options = TorchOptions(
        device=str(device), dtype="float32", lanes=4, kv_blocks=BLOCKS, threads=1, graphs=False
    )
    checks: dict[str, Callable[[], str]] = {
        "logits as on the CPU": lambda: _logits(files, options),
        "greedy and drawn ids, eager": lambda: _same_ids(
            files, replace(options, device="cpu"), options
        ),
        "greedy and drawn ids, recorded steps": lambda: _same_ids(
            files, options, replace(options, graphs=True)
        ),
        "ids read one step behind, with stops": lambda: _stops(files, options),
        "parked KV comes back": lambda: _park(device),
        "batch-invariant lanes": lambda: _invariant(files, options),
    }
    for name, check in checks.items():
        yield run_check(name, check)


def prompts(vocabulary: int, window: int) -> list[list[int]]:
    """Make prompts of several lengths."""
    generator = torch.Generator().manual_seed(8)
    lengths = [min(length, window - OUTPUTS) for length in PROMPT_LENGTHS]
    return [
        torch.randint(0, vocabulary, (length,), generator=generator).tolist() for length in lengths
    ]


SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(seed=5, temperature=0.8, top_p=0.9),
    SamplingParams(seed=6, top_k=40, repetition_penalty=1.1),
    SamplingParams(seed=7, temperature=0.5),
)


def run_sessions(
    engine: Engine, stop_ids: tuple[frozenset[int], ...] = (frozenset(),) * 4
) -> list[list[int]]:
    """Run the four sessions, in chunks and ticks of several steps, over scattered blocks; their ids."""
    info = engine.describe()
    driver = Driver(engine, blocks=[(block * 37 + 1) % info.blocks for block in range(info.blocks)])
    texts = prompts(info.vocabulary, info.window)
    opened = [
        driver.open(prompt, OUTPUTS, sampling, stop_ids=stops)
        for prompt, sampling, stops in zip(texts, SAMPLINGS, stop_ids, strict=True)
    ]
    driver.finish(steps=5, prompt_tokens=30, step_tokens=48)
    faults = [session.fault for session in opened if session.fault is not None]
    if faults:
        raise Found(f"a lane failed: {faults[0].text}")
    return [session.outputs for session in opened]


def _logits(files: TinyModel, options: TorchOptions) -> str:
    found = []
    for device in ("cpu", options.device):
        engine = build_torch_engine(files, replace(options, device=device))
        driver = Driver(engine)
        for prompt in prompts(files.config.vocabulary, files.config.window):
            driver.open(prompt, 1)
        found.append(engine.forward_only(driver.plan(steps=1)).cpu())
    return near(found[1], found[0], BOUND)


def _same_ids(files: TinyModel, options: TorchOptions, others: TorchOptions) -> str:
    wanted = run_sessions(build_torch_engine(files, options))
    found = run_sessions(build_torch_engine(files, others))
    if found != wanted:
        raise Found(f"session {_first_other(found, wanted)} differs")
    return f"{sum(map(len, wanted))} ids equal"


def _first_other(found: list[list[int]], wanted: list[list[int]]) -> int:
    return next(n for n, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b)


def _stops(files: TinyModel, options: TorchOptions) -> str:
    """Every session gets a stop id out of the middle of what it says; it must end there, and nobody else."""
    eager = build_torch_engine(files, options)
    free = run_sessions(eager)
    stops = tuple(frozenset({_fresh_id(ids, 5 + 3 * n)}) for n, ids in enumerate(free))
    wanted = run_sessions(build_torch_engine(files, options), stops)
    found = run_sessions(build_torch_engine(files, replace(options, graphs=True)), stops)
    if found != wanted:
        raise Found(f"session {_first_other(found, wanted)} differs")
    for ids, whole, stop in zip(found, free, stops, strict=True):
        end = next(n for n, token in enumerate(whole) if token in stop)
        if ids != whole[: end + 1]:
            raise Found("a session did not end at its stop id")
    return f"ended at {', '.join(str(len(ids)) for ids in found)} of {OUTPUTS} ids"


def _fresh_id(ids: list[int], first: int) -> int:
    """Find an id that is said for the first time at `first` or after it."""
    for at in range(first, len(ids)):
        if ids[at] not in ids[:at]:
            return ids[at]
    raise Found("a session says the same again and again")


def _park(device: torch.device) -> str:
    """Several pieces go out and come back elsewhere, while the pool is overwritten behind them."""
    one = KvShape(4, 1, 16, 4, 64, torch.bfloat16)
    many = max(PARKED_BLOCKS, PARK_BYTES // one.block_bytes) if device.type == "cuda" else 64
    pool = KvPool(replace(one, blocks=2 * many), device)
    with torch.inference_mode():
        for layer in range(one.layers):
            pool.keys[layer].normal_()
            pool.values[layer].normal_()
        out, back = list(range(0, 2 * many, 2)), list(range(1, 2 * many, 2))[::-1]
        before = pool.copy_of(out)
        pool.park_out(1, out)
        pool.clear(range(2 * many))
        pool.park_in(1, back)
        if not torch.equal(pool.copy_of(back), before):
            raise Found("blocks came back changed")
        if pool.parked():
            raise Found("the ticket was not used up")
    return f"{many * one.block_bytes / MIB:.0f} MiB there and back"


def _invariant(files: TinyModel, options: TorchOptions) -> str:
    engine = build_torch_engine(files, options)
    if not engine.describe().capabilities.batch_invariant:
        raise Found("a tile does not give the same bits in two cuts")
    seen = []
    for prompt_tokens, stride in ((None, 1), (1, 37), (7, 5), (50, 3)):
        driver = Driver(engine, blocks=[(block * stride + 1) % BLOCKS for block in range(BLOCKS)])
        driver.batch_invariant = True
        texts = prompts(files.config.vocabulary, files.config.window)
        opened = [driver.open(text, 6, SamplingParams(seed=n)) for n, text in enumerate(texts)]
        driver.finish(steps=3, prompt_tokens=prompt_tokens)
        seen.append([session.outputs for session in opened])
        for session in opened:
            driver.close(session)
        driver.tick()
    if any(other != seen[0] for other in seen[1:]):
        raise Found("ids depend on how prompts are cut")
    return "4 cuts equal"
