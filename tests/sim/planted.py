"""Bugs that are planted on purpose, to learn whether the simulation would find them.

Each is a change of the source text of one function, compiled again in its module for the time of a run. Text that is not there
any more is an error, so a plant that the product has outgrown is noticed. `only` narrows the faults to those that can bring it out;
the seed that found each one is kept in `killers.json` and replayed on every test run; `python -m tests.sim.hunt` renews it.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.sim.node import patched
from tests.sim.scenario import Outcome, run_seed

SEEDS_MAX = 200
KILLERS_PATH = Path(__file__).with_name("killers.json")
KILLERS: dict[str, int] = json.loads(KILLERS_PATH.read_text())


@dataclass(frozen=True)
class Planted:
    """One bug: in `where` ("module:Class.function"), `old` becomes `new`.

    `also` is another (where, old, new): a second guard that would cover for the first.
    """

    name: str
    where: str
    old: str
    new: str
    only: tuple[str, ...] = ()
    also: tuple[str, str, str] | None = None

    @property
    def killer(self) -> int:
        """The seed that found it last time."""
        return KILLERS.get(self.name, 0)


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
    Planted("no epoch check", f"{GENERATION}._on_node", "event.epoch != self.journal.epoch", "False", LIES),
    Planted("no link check", f"{GENERATION}._on_node", "event.link != placed.link", "False", LIES),
    Planted("no index check", f"{GENERATION}._fault", "row.first != first", "False", LIES),
    Planted("no length check", f"{GENERATION}._fault",
            "first + len(row.ids) > placed.max_output", "False", LIES),
    Planted("no vocabulary check", f"{GENERATION}._fault", "not 0 <= token < placed.vocabulary", "False", LIES),
    Planted("the epoch is not raised", f"{GENERATION}._leave", "self.journal.epoch += 1", "pass", CUTS),
    Planted("moves without end", f"{GENERATION}._fail_over",
            "self.journal.failures > self._limits.moves_max", "False", ("crash loop", "lane fault", "reset")),
    Planted("poison rule off", f"{GENERATION}._judge",
            "len(journal.boots_lost) >= self._limits.processes_lost_max", "False"),
    Planted("a cut is no suspicion", f"{GENERATION}._on_lost", "event.loss is Loss.CUT", "False"),
    Planted("a second end", f"{GENERATION}._end", "self.phase = Phase.ENDED", "pass"),
    Planted("a failure is no end", f"{GENERATION}._fail", "self.phase = Phase.ENDED", "pass", ("crash loop",)),
    Planted("cached tokens add up", f"{GENERATION}._note_cached",
            "if journal.cached_epoch == journal.epoch:", "if True:", CUTS),
    Planted("ids are journalled twice", f"{GENERATION}._on_row", "ids.extend(row.ids)", "ids.extend(row.ids * 2)"),
    Planted("stop ids do not end", f"{GENERATION}._stops", "token in placed.stop_ids", "False", LIES),
    # --- what the head holds ------------------------------------------------------------------------
    Planted("a reservation is kept", f"{RUNNER}._leave", "slot.reservation.release()", "pass"),
    Planted("a slot is kept", f"{RUNNER}._leave", "node.slots.pop(slot.session, None)", "pass"),
    Planted("a lost node keeps its sessions", f"{RUNNER}.node_lost",
            "self.feed(generation, t.NodeLost(slot.link, loss))", "pass", ("crash", "freeze node")),
    Planted("a wait has no end", f"{RUNNER}.tick", "self.room.expired(now_ns)", "()", ("wrong weights", "crash")),
    Planted("the journal does not travel", "superfluid_head.fleet.translate:open_of",
            "delivered=tuple(journal.ids)", "delivered=()", CUTS),
    Planted("the output limit is subtracted twice", "superfluid_head.fleet.translate:open_of",
            "max_output=max_output,", "max_output=max(1, max_output - len(journal.ids)),", CUTS),
    Planted("a deadline starts anew", "superfluid_head.fleet.translate:with_deadlines",
            "_left_ms(request.deadline_ns, now_ns)",
            "None if request.deadline_ns is None else 60_000", CUTS),
    Planted("stop ids stay behind", "superfluid_head.fleet.translate:open_of",
            "stop_ids=request.stop_ids", "stop_ids=()"),
    Planted("the choice stays behind", "superfluid_head.fleet.translate:open_of", "choice=request.choice", "choice=0"),
    # --- liveness -----------------------------------------------------------------------------------
    Planted("own pause is not noticed", f"{PULSE}.has_overslept",
            "self._own_pause.has_paused(now_ns)", "False"),
    Planted("leases are not renewed", f"{PULSE}.beat", "messages.append(Renew(heard.stamp_ns))", "pass"),
    Planted("stamps are not noted", f"{HEAD_NODE}._on_status",
            "max(standing.stamp_ns, status.stamp_ns)", "standing.stamp_ns"),
    Planted("deafness is no death", f"{PULSE}._verdict", "deaf_ns >= limits.dead_ms * MS", "False", ("half to node",)),
    Planted("silence is no death", f"{HEAD_NODE}._keep_pulse", "beat.verdict is Verdict.DEAD", "False",
            ("freeze node", "partition", "power loss")),
    Planted("a stalled session stays", f"{HEAD_NODE}._judge_sessions", "self._hooks.stalled(slot)", "pass",
            ("faulty node", "half to node", "late OPEN")),
    Planted("the last node is rested", f"{RUNNER}.fault", "is_last_healthy=is_last", "is_last_healthy=False",
            ("faulty node", "lane fault", "freeze node")),
    Planted("PING is not answered", f"{LINK}._deliver", "self._watch.may_answer(now_ns)", "False"),
    Planted("a retry storm", f"{HEAD_NODE}._rest", "uniform(0.0, longest / 1_000)", "uniform(0.0, 0.002)",
            ("power loss", "crash", "terminate")),
    # --- what a node promises -----------------------------------------------------------------------
    Planted("no fence", f"{TABLE}.may_emit", "now_ns >= placement.lease_until_ns", "False", LATE),
    Planted("RENEW counts from receipt", f"{TABLE}.renew",
            "stamp_ns + placement.ttl_ns", "now_ns + placement.ttl_ns", ("freeze head", "delay")),
    Planted("OPEN counts from receipt", f"{TABLE}.open",
            "stamp_ns + ttl_ns)", "now_ns + ttl_ns)", LATE),
    Planted("no tombstones", f"{TABLE}._remember", "self._epochs[key] = epoch", "pass", ("stale OPEN",)),
    Planted("an old epoch is taken", f"{TABLE}.open", "epoch <= known", "False", ("stale OPEN",)),
    Planted("a lost link computes on", f"{AGENT}.detach",
            "self._submit(*(Cancel(live.run_key) for live in lost))", "pass", ("head crash",)),
    Planted("DRAIN is ignored", f"{AGENT}._judge", "self.is_draining", "False", ("terminate", "drain", "goaway race"),
            ("superfluid_core.scheduler.gates:judge_load", "state.draining", "False")),
    Planted("rows are flushed twice", "superfluid_noded.outbound:Frames.take", "*tokens,", "*tokens, *tokens,"),
    Planted("CANCEL is ignored", f"{AGENT}._cancel", "live is not None", "False"),
    Planted("the minimum is lost", "superfluid_noded.judge:judge_open",
            "min_output=min(message.min_output, max_output)", "min_output=0"),
    Planted("a broken engine says goodbye", "superfluid_core.link.listen:Listener._handle",
            "if not self._closing.is_set():", "if False:"),
    # --- what everything stands on ------------------------------------------------------------------
    Planted("noise restarts at 0", f"{SIM}._choose",
            "_numbers(lane.key, index, 0)", "_numbers(lane.key, index - len(lane.spec.delivered), 0)", CUTS),
    Planted("draws restart at 0", f"{SIM}._draw", "_numbers(lane.key, index, attempt)",
            "_numbers(lane.key, index - len(lane.spec.delivered), attempt)", CUTS),
    Planted("an end of file is not final", f"{LINK}.on_eof", "self._gone(None)", "pass", ("half close",)),
    Planted("an unfinished frame may wait", f"{LINK}._on_timer",
            "deadline_ns is not None and deadline_ns <= now_ns", "False", ("half frame",)),
    Planted("a fresh link keeps the epoch", f"{GENERATION}._on_planned", "self.journal.epoch += 1", "pass"),
    Planted("a session is looked for on its old link", f"{RUNNER}._open",
            "= placed.link, action.epoch, False", "= slot.link, action.epoch, False", ("crash",)),
    Planted("a broken link of two keeps its sessions", "superfluid_head.fleet.wear:Wear.settle_orphans",
            "self._lost(number, loss)", "pass", ("reset", "flip"),
            (f"{HEAD_NODE}._judge_sessions", "self._hooks.stalled(slot)", "pass")),
    Planted("a refused OPEN may come again", f"{TABLE}.open", "if verdict is not Verdict.ACCEPTED:\n        self._remember(key, epoch)",
            "if verdict is not Verdict.ACCEPTED:\n        pass", ("late OPEN", "stale OPEN")),
    Planted("the queue of a link turns round", "superfluid_core.link.outbox:Outbox.pop",
            "self._queue.popleft()", "self._queue.pop()", ("freeze head", "half to head")),
)  # fmt: skip


def _find(where: str) -> tuple[Any, str, Any]:
    module_name, _, path = where.partition(":")
    owner: Any = importlib.import_module(module_name)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    return owner, name, owner.__dict__[name]


def mutate(planted: Planted) -> list[tuple[Any, str, Any]]:
    """Compile what is changed; returns patches. Raises ValueError when the text is not there."""
    changes = [(planted.where, planted.old, planted.new)]
    changes += [] if planted.also is None else [planted.also]
    return [patch for change in changes for patch in _change(*change)]


def _change(where: str, old: str, new: str) -> list[tuple[Any, str, Any]]:
    owner, name, original = _find(where)
    source = textwrap.dedent(inspect.getsource(original))
    if source.count(old) < 1:
        raise ValueError(f"{old!r} is not in {where}")
    scope = original.__globals__
    made: dict[str, Any] = {}
    code = compile("from __future__ import annotations\n" + source.replace(old, new),
                   f"<planted in {where}>", "exec")  # fmt: skip
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
        return run_seed(seed, planted.only, is_dense=True)


def hunt(planted: Planted, seeds: int = SEEDS_MAX) -> Outcome | None:
    """Find the first seed that catches the bug."""
    for seed in range(seeds):
        outcome = try_seed(planted, seed)
        if outcome.violation:
            return outcome
    return None
