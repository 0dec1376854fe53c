"""Memory pressure of the host: the kernel's text, the verdict, and what of it reaches the scheduler."""

from __future__ import annotations

from pathlib import Path

import pytest

from superfluid_core.scheduler.plan import PressureLevel
from superfluid_noded.psi import PressureSample, PressureWatch, judge_pressure, parse_pressure
from tests.unit.noded.conftest import NodeRig, check

REAL = Path("/proc/pressure/memory")


def text(some: float, full: float) -> str:
    tail = "avg60=0.10 avg300=0.02 total=123456"
    return f"some avg10={some:.2f} {tail}\nfull avg10={full:.2f} {tail}\n"


@pytest.mark.parametrize(
    ("some", "full", "level"),
    [
        (0.0, 0.0, PressureLevel.NONE),
        (9.99, 4.99, PressureLevel.NONE),
        (10.0, 0.0, PressureLevel.WARNING),
        (100.0, 4.99, PressureLevel.WARNING),
        (10.0, 5.0, PressureLevel.CRITICAL),
        (0.0, 5.0, PressureLevel.CRITICAL),
    ],
)
def test_the_marks_are_those_of_the_documents(
    some: float, full: float, level: PressureLevel
) -> None:
    assert judge_pressure(parse_pressure(text(some, full))) is level


def test_a_kernel_without_the_full_line_is_read_too() -> None:
    assert parse_pressure("some avg10=11.5 avg60=0 avg300=0 total=0") == PressureSample(11.5, 0.0)


@pytest.mark.parametrize(
    "wrong", ["", "full avg10=1 total=0", "some", "some avg10=x", "some avg10=nan", "some avg10=-1", "\n\n"]
)  # fmt: skip
def test_what_is_not_such_a_text_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_pressure(wrong)


def test_only_changes_are_passed_on_and_a_lost_file_is_no_pressure(tmp_path: Path) -> None:
    file = tmp_path / "memory"
    heard: list[PressureLevel] = []
    watch = PressureWatch(file, lambda pressure: heard.append(pressure.level))
    watch.look()
    for some, full in ((0, 0), (12, 0), (15, 1), (20, 9), (20, 9), (12, 0), (1, 0)):
        file.write_text(text(some, full))
        watch.look()
    file.write_text(text(50, 50))
    watch.look()
    file.unlink()
    watch.look()
    warning, critical, none = PressureLevel.WARNING, PressureLevel.CRITICAL, PressureLevel.NONE
    assert heard == [warning, critical, warning, none, critical, none]


@pytest.mark.parametrize("file", [REAL] if REAL.is_file() else [])
def test_the_real_file_can_be_read(file: Path) -> None:
    sample = parse_pressure(file.read_text())
    assert 0 <= sample.full_pct <= 100


def test_a_critical_host_preempts_background_sessions_of_a_live_node(tmp_path: Path) -> None:
    file = tmp_path / "memory"
    file.write_text(text(0, 0))
    flags = {"os_pressure": "on", "os_pressure_file": str(file)}

    async def body(rig: NodeRig) -> None:
        from superfluid_core.session import QosClass

        head = await rig.link()
        head.open(1, max_output=400, qos=QosClass.BACKGROUND)
        head.open(2, max_output=400, qos=QosClass.AGENT)
        await head.until(lambda: len(head.ids(1)) > 20 and len(head.ids(2)) > 20)
        file.write_text(text(60, 30))
        assert rig.node.pressure is not None
        rig.node.pressure.look()
        await rig.until(lambda: rig.node.scheduler.stats().preempted_for_pressure == 1)
        assert rig.node.figures()["node"]["pressure"] == "critical"
        await head.until(lambda: head.is_finished(2))
        await head.until(lambda: head.is_finished(1))
        assert len(head.ids(1)) == 400

    check(body, flags=flags, decode_rate=500.0)
