"""`--record` on a live node: exact replay, no content, mode 0600, and ends that are told."""

from __future__ import annotations

import json
import stat
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from superfluid_core.blockhash import block_chain, root_hash
from superfluid_core.engine.record import RecordingError, replay
from superfluid_core.errors import ConfigError
from superfluid_core.session import QosClass
from superfluid_core.wire.messages import CancelSession, Pin, SetClass
from superfluid_head.cli import command
from superfluid_noded import recording
from superfluid_noded.recording import RecordFile, Recordings
from tests.unit.noded.conftest import KEYS, NodeRig, check

SHARED = tuple(range(300, 380))


async def busy_hour(rig: NodeRig) -> None:
    """Sessions of every kind: shared prefixes, preemption, a cancel, a change of class, a refusal, pins."""
    first, second, third = [await rig.link(f"head-{number}") for number in (1, 2, 3)]
    for session in range(1, 9):
        qos = QosClass.BACKGROUND if session % 2 else QosClass.AGENT
        head = first if session < 5 else second
        fields: dict[str, Any] = {"max_output": 40, "qos": qos, "tenant": f"t{session % 3}"}
        head.open(session, prompt=(*SHARED, session), **fields)
    await rig.until(lambda: rig.node.scheduler.stats().output_tokens > 10)
    third.open(20, prompt=SHARED[:40], max_output=10, qos=QosClass.INTERACTIVE)
    third.open(21, prompt=(1,) * 4096)
    second.link.send(SetClass(8, 1, QosClass.INTERACTIVE))
    second.link.send(CancelSession(7, 1, "test"))
    names = tuple(block_chain(root_hash(KEYS.prefix_salt, tenant="t1"), SHARED, 16))
    first.link.send(Pin(names, 60_000, "m"))
    await first.until(lambda: all(first.is_finished(session) for session in (1, 2, 3, 4)))
    await second.until(lambda: all(second.is_finished(session) for session in (5, 6, 8)))
    await third.until(lambda: third.is_finished(20))
    for session in range(30, 36):
        prompt = tuple(range(session * 10, session * 10 + 100))
        third.open(session, prompt=prompt, max_output=30, stop_ids=(5, 6))
        await third.until(partial(third.is_finished, session))


def record(path: Path, **flags: Any) -> list[str]:
    given = {
        "record": str(path),
        "queue_policy": "fair",
        "tenant_weights": "t1=3,t2=1",
        "max_queue": "64",
    } | flags
    # slow enough that a busy machine still sends the chat while the others run
    check(busy_hour, flags=given, lanes=2, blocks=48, decode_rate=600.0, prefill_rate=20000.0)
    return path.read_text().splitlines()


@pytest.mark.parametrize(("content", "parks"), [(False, False), (True, False), (False, True)])
def test_a_replay_makes_the_same_plans_and_effects(
    tmp_path: Path, content: bool, parks: bool
) -> None:
    file = tmp_path / "inputs.jsonl"
    park = {"park": True, "park_bytes": "1MiB", "preempt_mode": "swap"} if parks else {}
    lines = record(file, record_content=content, **park)
    outcome = replay(lines)
    assert outcome.diverged_at is None
    assert outcome.is_whole
    assert outcome.stats.swapped_for_class == (outcome.stats.preempted_for_class if parks else 0)
    assert outcome.calls == len(lines) - 2
    assert outcome.calls > 50
    assert outcome.digest == json.loads(lines[-1])[1]
    assert outcome.stats.preempted_for_class > 0
    assert outcome.stats.prefix_hit_tokens > 0
    assert any(line.startswith('["pin"') for line in lines)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_second_model_has_a_recording_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "inputs.jsonl"

    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        for session, model in enumerate(("m", "fim", "fim", "m", "fim"), 1):
            head.open(session, model=model, prompt=tuple(range(40 + session)), max_output=20)
        await head.until(lambda: all(head.is_finished(session) for session in range(1, 6)))
        names = tuple(block_chain(root_hash(KEYS.prefix_salt, tenant="t"), tuple(range(42)), 16))
        head.link.send(Pin(names, 60_000, "fim"))
        await rig.until(lambda: rig.node.pins[1].blocks == 2)

    fim = {"lanes": 1, "window": 256, "blocks": 64, "eos_probability": 0.0}
    check(body, flags={"record": str(file)}, fim=fim)
    for path, sessions, pins in ((file, 2, 0), (tmp_path / "inputs.jsonl.fim", 3, 2)):
        lines = path.read_text().splitlines()
        outcome = replay(lines)
        assert (outcome.diverged_at, outcome.is_whole) == (None, True)
        assert outcome.stats.accepted == sessions
        assert sum(line.startswith('["pin"') for line in lines) == pins
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_recording_that_exists_is_not_overwritten_whichever_model_s_it_is(tmp_path: Path) -> None:
    (tmp_path / "r.fim").write_text("kept")
    with pytest.raises(ConfigError, match=r"r\.fim"):
        Recordings(tmp_path / "r", 2, has_content=False)
    assert (tmp_path / "r.fim").read_text() == "kept"


def test_without_content_no_id_and_no_name_can_be_read(tmp_path: Path) -> None:
    plain = record(tmp_path / "plain.jsonl", record_content=True)
    closed = record(tmp_path / "closed.jsonl")

    def submitted(lines: list[str]) -> list[dict[str, Any]]:
        calls = [json.loads(line) for line in lines[1:]]
        inputs = [item for call in calls if call[0] == "receive" for item in call[2]]
        return [item[1] for item in inputs if item[0] == "submit"]

    assert json.loads(closed[0])["content"] is False
    assert "head-1" in plain[1] + "".join(plain)
    assert "head-1" not in "".join(closed)
    open_prompts = {spec["prompt"] for spec in submitted(plain)}
    assert not open_prompts & {spec["prompt"] for spec in submitted(closed)}
    assert not {"t0", "t1", "t2"} & {spec["tenant"] for spec in submitted(closed)}
    lengths = [len(spec["prompt"]) for spec in submitted(closed)]
    assert sorted(lengths) == sorted(len(spec["prompt"]) for spec in submitted(plain))
    # the same prompt twice never looks the same in two recordings: the salt is of this one alone
    again = record(tmp_path / "again.jsonl")
    assert not {s["prompt"] for s in submitted(again)} & {s["prompt"] for s in submitted(closed)}


def test_a_changed_line_is_found_and_named(tmp_path: Path) -> None:
    lines = record(tmp_path / "inputs.jsonl")
    number = next(n for n, line in enumerate(lines) if '"submit"' in line and n > 3)
    call = json.loads(lines[number])
    call[2][0][1]["max_output"] = 1
    lines[number] = json.dumps(call)
    outcome = replay(lines)
    assert outcome.diverged_at is not None
    assert number < outcome.diverged_at < len(lines)


def test_a_recording_without_its_end_is_replayed_as_far_as_it_goes(tmp_path: Path) -> None:
    lines = record(tmp_path / "inputs.jsonl")
    outcome = replay(lines[:-1])
    assert outcome.diverged_at is None
    assert not outcome.is_whole


@pytest.mark.parametrize(
    "lines",
    [[], ["{}"], ["nothing"], ['{"format":"other/1"}'], ['{"format":"superfluid-recording/2"}']],
)
def test_what_is_no_recording_is_refused(lines: list[str]) -> None:
    with pytest.raises(RecordingError, match="recording"):
        replay(lines)


@pytest.mark.parametrize(
    "line",
    ["[", '["sleep"]', '["receive",1,[["walk"]],"00"]', '["pin",9,true]', '["plan","x","y"]',
     '["receive",1,[["submit",{}]],"00"]'],
)  # fmt: skip
def test_a_broken_line_is_named_by_number(tmp_path: Path, line: str) -> None:
    lines = record(tmp_path / "inputs.jsonl")[:3]
    with pytest.raises(RecordingError, match="line 4"):
        replay([*lines, line])


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "there"
    file.write_text("precious")
    with pytest.raises(ConfigError, match="File exists"):
        RecordFile(file, has_content=False)
    assert file.read_text() == "precious"


def test_a_recording_that_grows_too_large_ends_and_the_node_serves_on(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "r", has_content=True, bytes_max=100)
    for _ in range(50):
        file.add(lambda recorder: recorder.pinned(1, pinned=True))
    file.close()
    lines = (tmp_path / "r").read_text().splitlines()
    assert lines == ['["pin",1,true]'] * 6


def test_a_writer_that_cannot_keep_up_ends_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "CALLS_WAITING_MAX", 4)
    from threading import Event

    gate = Event()
    file = RecordFile(tmp_path / "r", has_content=True)

    def slow(recorder: Any) -> str:
        gate.wait(10)
        return str(recorder.pinned(0, pinned=True))

    for _ in range(8):
        file.add(slow)
    gate.set()
    file.close()
    lines = (tmp_path / "r").read_text().splitlines()
    assert 4 <= len(lines) <= 5
    assert '"end"' not in lines[-1]


def test_the_command_line_replays_a_recording_and_tells_where_another_decision_was_made(
    tmp_path: Path,
) -> None:
    file = tmp_path / "inputs.jsonl"
    lines = record(file)
    good = CliRunner().invoke(command, ["simulate", "replay", str(file), "--json"])
    assert good.exit_code == 0
    told = json.loads(good.output)
    assert told["diverged_at"] is None
    assert told["is_whole"]
    header = json.loads(lines[0])
    header["limits"]["lanes"] = 3
    file.write_text("\n".join([json.dumps(header), *lines[1:]]))
    other = CliRunner().invoke(command, ["simulate", "replay", str(file)])
    assert other.exit_code == 1
    assert "decides otherwise" in other.output


def test_plans_that_were_foreseen_and_gone_on_with_are_made_again_in_a_replay(
    tmp_path: Path,
) -> None:
    file = tmp_path / "inputs.jsonl"

    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        for session in (1, 2):
            head.open(session, max_output=400 + 100 * session)
        await head.until(lambda: all(head.is_finished(session) for session in (1, 2)))

    check(body, flags={"record": str(file)}, decode_rate=400.0)
    lines = file.read_text().splitlines()
    outcome = replay(lines)
    assert (outcome.diverged_at, outcome.is_whole) == (None, True)
    assert any(line.startswith('["foresee"') for line in lines)
    calls = [json.loads(line) for line in lines if line.startswith('["receive"')]
    assert any(item[0] == "tick" and len(item) > 5 for call in calls for item in call[2])
