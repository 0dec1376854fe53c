"""Bugs that are planted on purpose, to learn whether the simulation would find them.

Each is a change of the source text of one function, compiled again in its module for the time of a run. Text that is not there
any more is an error, so a plant that the product has outgrown is noticed. `only` narrows the faults to those that can bring it out;
`killer` is the seed that is replayed on every test run.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.sim.node import patched
from tests.sim.scenario import Outcome, run_seed

SEEDS_MAX = 200


@dataclass(frozen=True)
class Planted:
    """One bug: in `where` ("module:Class.function"), `old` becomes `new`."""

    name: str
    where: str
    old: str
    new: str
    only: tuple[str, ...] = ()
    killer: int = 0


GENERATION = "superfluid_head.fleet.generation:GenerationMachine"
RUNNER = "superfluid_head.fleet.runner:Runner"
HEAD_NODE = "superfluid_head.fleet.node:FleetNode"
PULSE = "superfluid_head.fleet.pulse:Pulse"
TABLE = "superfluid_noded.sessions:SessionTable"
AGENT = "superfluid_noded.agent:Agent"
TELLER = "superfluid_noded.teller:Teller"
LINK = "superfluid_core.link.link:Link"
SIM = "superfluid_core.engine.sim:SimEngine"
SERVER = "superfluid_noded.server:NodeServer"

LIES = ("faulty node",)
CUTS = ("crash", "reset", "freeze node", "duplicate link")
LATE = ("half to node", "freeze node", "delay", "late OPEN", "starve leases")

PLANTED = (
    # --- what the head takes for granted ------------------------------------------------------------
    Planted("no epoch check", f"{GENERATION}._on_node", "event.epoch != self.journal.epoch", "False", LIES, killer=2),
    Planted("no link check", f"{GENERATION}._on_node", "event.link != placed.link", "False", LIES, killer=1),
    Planted("no index check", f"{GENERATION}._fault", "row.first != first", "False", LIES),
    Planted("no length check", f"{GENERATION}._fault",
            "first + len(row.ids) > placed.max_output", "False", LIES),
    Planted("no vocabulary check", f"{GENERATION}._fault", "not 0 <= token < placed.vocabulary", "False", LIES, killer=1),
    Planted("the epoch is not raised", f"{GENERATION}._leave", "self.journal.epoch += 1", "pass", CUTS),
    Planted("moves without end", f"{GENERATION}._fail_over",
            "self.journal.failures > self._limits.moves_max", "False", ("crash loop", "lane fault", "reset"), killer=1),
    Planted("poison rule off", f"{GENERATION}._judge",
            "len(journal.boots_lost) >= self._limits.processes_lost_max", "False", killer=4),
    Planted("a cut is no suspicion", f"{GENERATION}._on_lost", "event.loss is Loss.CUT", "False", killer=4),
    Planted("a second end", f"{GENERATION}._end", "self.phase = Phase.ENDED", "pass"),
    Planted("a failure is no end", f"{GENERATION}._fail", "self.phase = Phase.ENDED", "pass", ("crash loop",), killer=1),
    Planted("cached tokens add up", f"{GENERATION}._note_cached",
            "if journal.cached_epoch == journal.epoch:", "if True:", CUTS, killer=8),
    Planted("ids are journalled twice", f"{GENERATION}._on_row", "ids.extend(row.ids)", "ids.extend(row.ids * 2)"),
    Planted("stop ids do not end", f"{GENERATION}._stops", "token in placed.stop_ids", "False", LIES, killer=9),
    # --- what the head holds ------------------------------------------------------------------------
    Planted("a reservation is kept", f"{RUNNER}._leave", "slot.reservation.release()", "pass"),
    Planted("a slot is kept", f"{RUNNER}._leave", "node.slots.pop(slot.session, None)", "pass"),
    Planted("a lost node keeps its sessions", f"{RUNNER}.node_lost",
            "self.feed(generation, t.NodeLost(slot.link, loss))", "pass", ("crash", "freeze node"), killer=5),
    Planted("a wait has no end", f"{RUNNER}.tick", "self.room.expired(now_ns)", "()", ("wrong weights", "crash"), killer=8),
    Planted("the journal does not travel", "superfluid_head.fleet.translate:open_of",
            "delivered=tuple(journal.ids)", "delivered=()", CUTS),
    Planted("the output limit is subtracted twice", "superfluid_head.fleet.translate:open_of",
            "max_output=max_output,", "max_output=max(1, max_output - len(journal.ids)),", CUTS),
    Planted("stop ids stay behind", "superfluid_head.fleet.translate:open_of",
            "stop_ids=request.stop_ids", "stop_ids=()", killer=14),
    Planted("the choice stays behind", "superfluid_head.fleet.translate:open_of", "choice=request.choice", "choice=0"),
    # --- liveness -----------------------------------------------------------------------------------
    Planted("own pause is not noticed", f"{PULSE}.has_overslept",
            "self._own_pause.has_paused(now_ns)", "False", killer=5),
    Planted("leases are not renewed", f"{PULSE}.beat", "messages.append(Renew(stamp_ns))", "pass", killer=26),
    Planted("stamps are not noted", f"{HEAD_NODE}._on_status",
            "max(standing.stamp_ns, status.stamp_ns)", "standing.stamp_ns", killer=2),
    Planted("silence is no death", f"{HEAD_NODE}._keep_pulse", "beat.verdict is Verdict.DEAD", "False",
            ("freeze node", "partition", "power loss"), killer=13),
    Planted("a stalled session stays", f"{HEAD_NODE}._judge_sessions", "self._hooks.stalled(slot)", "pass",
            ("faulty node", "half to node", "late OPEN"), killer=18),
    Planted("a retry storm", f"{HEAD_NODE}._rest", "uniform(0.0, longest / 1_000)", "uniform(0.0, 0.002)",
            ("power loss", "crash", "terminate")),
    # --- what a node promises -----------------------------------------------------------------------
    Planted("no fence", f"{TABLE}.may_emit", "now_ns >= placement.lease_until_ns", "False", LATE, killer=3),
    Planted("RENEW counts from receipt", f"{TABLE}.renew",
            "stamp_ns + placement.ttl_ns", "now_ns + placement.ttl_ns", LATE, killer=3),
    Planted("OPEN counts from receipt", f"{TABLE}.open",
            "stamp_ns + ttl_ns)", "now_ns + ttl_ns)", LATE, killer=8),
    Planted("no tombstones", f"{TABLE}._remember", "self._epochs[key] = epoch", "pass", ("stale OPEN",)),
    Planted("an old epoch is taken", f"{TABLE}.open", "epoch <= known", "False", ("stale OPEN",)),
    Planted("a lost link computes on", f"{AGENT}.detach",
            "self._submit(*(Cancel(live.run_key) for live in lost))", "pass", ("head crash",), killer=3),
    Planted("CANCEL is ignored", f"{AGENT}._cancel", "live is not None", "False"),
    Planted("the minimum is lost", "superfluid_noded.judge:judge_open",
            "min_output=min(message.min_output, max_output)", "min_output=0"),
    Planted("a broken engine says goodbye", "superfluid_core.link.listen:Listener._handle",
            "if not self._closing.is_set():", "if False:", killer=4),
    # --- what everything stands on ------------------------------------------------------------------
    Planted("noise restarts at 0", f"{SIM}._choose",
            "_numbers(lane.key, index, 0)", "_numbers(lane.key, index - len(lane.spec.delivered), 0)", CUTS, killer=2),
    Planted("draws restart at 0", f"{SIM}._draw", "_numbers(lane.key, index, attempt)",
            "_numbers(lane.key, index - len(lane.spec.delivered), attempt)", CUTS),
    Planted("the queue of a link turns round", "superfluid_core.link.outbox:Outbox.pop",
            "self._queue.popleft()", "self._queue.pop()", ("freeze head", "half to head"), killer=3),
)  # fmt: skip


def _find(where: str) -> tuple[Any, str, Any]:
    module_name, _, path = where.partition(":")
    owner: Any = importlib.import_module(module_name)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    return owner, name, owner.__dict__[name]


def mutate(planted: Planted) -> list[tuple[Any, str, Any]]:
    """Compile the changed function; returns patches. Raises ValueError when the text is not there."""
    owner, name, original = _find(planted.where)
    source = textwrap.dedent(inspect.getsource(original))
    if source.count(planted.old) < 1:
        raise ValueError(f"{planted.name}: {planted.old!r} is not in {planted.where}")
    scope = original.__globals__
    made: dict[str, Any] = {}
    code = compile("from __future__ import annotations\n" + source.replace(planted.old, planted.new),
                   f"<{planted.name}>", "exec")  # fmt: skip
    exec(code, scope, made)
    patches = [(owner, name, made[name])]
    if inspect.ismodule(owner):  # whoever imported it by name holds it too
        importers = [
            m for m in list(_modules()) if m.__dict__.get(name) is original and m is not owner
        ]
        patches += [(module, name, made[name]) for module in importers]
    return patches


def _modules() -> Iterator[Any]:
    yield from (m for n, m in sys.modules.items() if n.startswith("superfluid_") and m is not None)


@contextmanager
def growing(planted: Planted) -> Iterator[None]:
    with patched(*mutate(planted)):
        yield


def try_seed(planted: Planted, seed: int) -> Outcome:
    with growing(planted):
        return run_seed(seed, planted.only)


def hunt(planted: Planted, seeds: int = SEEDS_MAX) -> Outcome | None:
    """Find the first seed that catches the bug."""
    for seed in range(seeds):
        outcome = try_seed(planted, seed)
        if outcome.violation:
            return outcome
    return None
