"""One model over two processes: the same ids as one, plans as bytes, even cuts, and an end when a rank is gone."""

from __future__ import annotations

import random
import subprocess
from dataclasses import replace
from typing import Any

import msgpack
import pytest
import torch

from superfluid_core.clock import SystemClock
from superfluid_core.engine.base import Engine
from superfluid_core.engine.torch.build import TorchOptions, build_torch_engine
from superfluid_core.engine.torch.drive import Driver
from superfluid_core.engine.torch.parallel import group, launch
from superfluid_core.engine.torch.parallel.codec import plan_bytes, plan_of
from superfluid_core.engine.torch.parallel.launch import build_parallel
from superfluid_core.engine.torch.parallel.shards import ShardedSource, local_config
from superfluid_core.engine.torch.selftest.engines import run_sessions
from superfluid_core.engine.torch.selftest.model import TinyModel
from superfluid_core.errors import ConfigError, EngineError
from superfluid_core.modelfiles.resolve import ModelFiles
from superfluid_core.scheduler.plan import (
    BlockCopy,
    LanePlan,
    LaneStart,
    Park,
    StepDone,
    TickDone,
    TickOutcome,
    TickPlan,
)
from superfluid_core.session import (
    Grammar,
    GrammarKind,
    QosClass,
    SamplingParams,
    SessionKey,
    SessionSpec,
)

OPTIONS = TorchOptions(device="cpu", dtype="float32", lanes=4, kv_blocks=64, threads=1)


def files_of(tiny: TinyModel) -> ModelFiles:
    return ModelFiles(tiny.path, "hf", "tiny")


def interrupted_after(engine: Engine, steps: int) -> tuple[TickDone, list[int]]:
    """Run one session on lane 3 with an interruption, then to its end; the interrupted tick, and the ids."""
    driver = Driver(engine, blocks=range(40, 64))
    driver._frees += range(4)
    session = driver.open([1, 2, 3], 30)
    driver.tick(steps=1)
    seen: list[StepDone] = []

    def on_step(step: StepDone) -> None:
        seen.append(step)
        driver._take(step)

    done = engine.run(driver.plan(steps=10), on_step, lambda: len(seen) >= steps)
    driver.finish()
    return done, session.outputs


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_two_ranks_say_what_one_says_and_end_together(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One start of two processes for all of it: equal ids, an interruption that both take, and a rank that dies."""
    children: list[subprocess.Popen[bytes]] = []
    begin = launch._start

    def start(*arguments: Any) -> subprocess.Popen[bytes]:
        children.append(begin(*arguments))
        return children[-1]

    monkeypatch.setattr(launch, "_start", start)
    alone = build_torch_engine(tiny_model, OPTIONS)
    engine = build_parallel(files_of(tiny_model), OPTIONS, 2, SystemClock())
    try:
        info = engine.describe()
        assert info.kv_bytes_per_token * 2 == alone.describe().kv_bytes_per_token
        assert not info.capabilities.embeddings
        assert run_sessions(engine) == run_sessions(alone)
        done, ids = interrupted_after(engine, 3)
        assert (done.outcome, done.steps) == (TickOutcome.INTERRUPTED, 3)
        assert ids == interrupted_after(alone, 3)[1]
        children[0].kill()
        children[0].wait(10)
        monkeypatch.setattr(group, "COLLECTIVE_SECONDS", 3.0)
        with pytest.raises(EngineError, match="ranks: "):
            interrupted_after(engine, 3)
    finally:
        engine.close()
    assert children[0].poll() is not None


def test_a_model_that_does_not_come_out_even_is_refused_before_anything_starts(
    tiny_model: TinyModel,
) -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel 4: the model has 2 key heads"):
        build_parallel(files_of(tiny_model), OPTIONS, 4, SystemClock())
    with pytest.raises(ConfigError, match="--tensor-parallel 3: the model has 4 heads"):
        local_config(tiny_model.config, 3)


class Tensors:
    def __init__(self, **tensors: torch.Tensor) -> None:
        self._tensors = {name.replace("__", "."): tensor for name, tensor in tensors.items()}

    def has(self, name: str) -> bool:
        return name in self._tensors

    def get(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def test_shares_put_together_are_the_whole_and_a_bias_is_added_once() -> None:
    whole = Tensors(
        l__q_proj__weight=torch.randn(8, 6), l__q_proj__bias=torch.randn(8),
        l__o_proj__weight=torch.randn(6, 8), l__o_proj__bias=torch.randn(6),
        l__input_layernorm__weight=torch.randn(6),
    )  # fmt: skip
    shares = [ShardedSource(whole, rank, 2) for rank in range(2)]
    for name in ("l.q_proj.weight", "l.q_proj.bias"):
        assert torch.equal(torch.cat([share.get(name) for share in shares]), whole.get(name))
    parts = [share.get("l.o_proj.weight") for share in shares]
    assert torch.equal(torch.cat(parts, 1), whole.get("l.o_proj.weight"))
    assert torch.equal(
        sum(share.get("l.o_proj.bias") for share in shares),  # type: ignore[arg-type]  # of tensors
        whole.get("l.o_proj.bias"),
    )
    assert all(
        torch.equal(s.get("l.input_layernorm.weight"), whole.get("l.input_layernorm.weight"))
        for s in shares
    )
    assert shares[0].has("l.q_proj.bias")
    assert not shares[0].has("l.k_proj.bias")


def random_plan(seed: int) -> TickPlan:
    source = random.Random(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(source.randrange(1 << 17) for _ in range(count))

    sampling = SamplingParams(
        temperature=source.random(), seed=source.randrange(1 << 64), logit_bias=((3, -1.5), (9, 2)),
        bad_words=((1, 2), (7,)), logprobs=source.choice((None, 0, 5)),
    )  # fmt: skip
    spec = SessionSpec(
        SessionKey("head-é", source.randrange(1 << 63)), "m", ids(5), 9, delivered=ids(2),
        stop_ids=frozenset(ids(3)), sampling=sampling, qos=QosClass.BACKGROUND, cache_salt=b"\x00\xff",
        grammar=source.choice((None, Grammar(GrammarKind.REGEX, "a+"))), deadline_ns=1 << 50,
    )  # fmt: skip
    return TickPlan(
        tick=seed,
        lanes=(LanePlan(1, True, 7, ids(1), 4, 2, ids(3)), LanePlan(0, False, 0, ids(9), 0, 0, ())),
        step_tokens=64,
        starts=(LaneStart(1, spec, ids(2)),),
        frees=(3, 4),
        copies=(BlockCopy(1, 2),),
        park_out=(Park(1, ids(2)),),
        park_in=(Park(2, ids(1)),),
        park_drop=(9,),
        batch_invariant=bool(seed % 2),
    )


def test_a_plan_comes_through_bytes_as_it_was() -> None:
    for seed in range(50):
        plan = random_plan(seed)
        found = plan_of(plan_bytes(plan))
        assert replace(found, lanes=()) == replace(plan, lanes=())
        assert list(found.lanes) == list(plan.lanes)
        assert type(found.starts[0].spec.qos) is QosClass
        assert type(found.starts[0].spec.key) is SessionKey


def test_what_is_no_plan_is_refused() -> None:
    plain = msgpack.unpackb(plan_bytes(random_plan(1)))
    broken: list[Any] = [b"", b"\xc1", msgpack.packb(7), msgpack.packb(plain[:-1])]
    for place, value in ((0, "tick"), (1, [[1]]), (3, [[1, [], []]]), (9, 3)):
        changed = list(plain)
        changed[place] = value
        broken.append(msgpack.packb(changed))
    for data in broken:
        with pytest.raises(ValueError, match="plan"):
            plan_of(data)
