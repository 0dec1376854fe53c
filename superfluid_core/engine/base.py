"""The contract between a scheduler's plans and whatever executes them.

An engine holds no policy. It owns tensors (or pretends to), runs one plan at a time in its own thread, reports every
forward pass, and reads one flag between steps. It mutates only the KV blocks that the plan names, and its sampling rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from superfluid_core.scheduler.plan import StepDone, TickDone, TickPlan
from superfluid_core.session import Determinism

OnStep = Callable[[StepDone], None]
Interrupted = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What this engine can do; a request that needs more is refused before it is queued."""

    penalties: bool = True
    logit_bias: bool = True
    logprobs: bool = True
    structured_output: bool = False
    embeddings: bool = False
    batch_invariant: bool = False
    swap: bool = False
    prompt_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What `describe()` returns; constant for the life of the engine.

    Lengths are tokens. `weights_fingerprint` names the exact numbers, `engine_build` the code and dtype that run
    them; sessions move only between equal weights. `cuts_are_free` says that a step costs the same however a tick is cut.
    `host_copy_bytes_per_s` is how fast parked KV moves, measured at start, one way; 0 where nothing can be parked for real.
    `host_copy_overhead_ns` is what one such copy takes beside its bytes.
    """

    weights_fingerprint: str
    text_fingerprint: str
    engine_build: str
    dtype: str
    device: str
    vocabulary: int
    eos_ids: tuple[int, ...]
    window: int
    lanes: int
    block_tokens: int
    blocks: int
    step_tokens: int
    determinism: Determinism
    cuts_are_free: bool = False
    capabilities: Capabilities = field(default_factory=Capabilities)
    kv_bytes_per_token: int = 0
    host_copy_bytes_per_s: float = 0.0
    host_copy_overhead_ns: int = 0


class Engine(Protocol):
    """Runs plans. All methods but `close` are called from one thread."""

    def describe(self) -> EngineInfo: ...

    def run(self, plan: TickPlan, on_step: OnStep, interrupted: Interrupted) -> TickDone:
        """Execute a plan, blocking. Calls `on_step` after every forward pass, in order.

        Raises EngineError when the engine as a whole cannot go on; a single lane's trouble is a LaneFault in StepDone.
        """
        ...

    def close(self) -> None: ...
