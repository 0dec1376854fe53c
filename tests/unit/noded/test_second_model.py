"""A fill-in-the-middle model beside the main one: own lanes, own window, one link."""

from __future__ import annotations

from pathlib import Path

import pytest

from superfluid_core.errors import ConfigError, ErrorCode
from superfluid_core.session import QosClass
from superfluid_core.wire.messages import Welcome
from superfluid_noded.build import find_models
from superfluid_noded.config import Surroundings, build_config, read_settings
from tests.unit.noded.conftest import NodeRig, check

FIM = {"lanes": 2, "window": 256, "blocks": 64, "eos_probability": 0.0}


def test_it_is_offered_and_runs_on_lanes_of_its_own() -> None:
    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        welcome = head.link.peer
        assert isinstance(welcome, Welcome)
        offers = {offer.name: offer for offer in welcome.models}
        assert list(offers) == ["m", "alias", "fim"]
        assert (offers["fim"].lanes, offers["fim"].window) == (2, 256)
        for session in range(1, 5):
            head.open(session, max_output=3_000)
        await rig.until(lambda: rig.node.scheduler.stats().lanes_busy == 4)
        head.open(10, model="fim", max_output=16, qos=QosClass.COMPLETION)
        await head.until(lambda: head.is_finished(10))
        assert len(head.ids(10)) == 16
        assert not head.is_finished(1)
        assert rig.node.scheduler.stats().preemptions == 0
        status = rig.node.service.status()
        assert (status.lanes, status.lanes_busy) == (6, 4)

    check(body, fim=FIM, decode_rate=200.0)


def test_its_window_is_its_own_and_unknown_models_stay_unknown() -> None:
    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        head.open(1, model="fim", prompt=(1,) * 256)
        head.open(2, model="m", prompt=(1,) * 256)
        head.open(3, model="other")
        await head.until(lambda: head.refused(1) and head.refused(3) and head.is_finished(2))
        refused = [head.refused(1), head.refused(3)]
        codes = [each.code for each in refused if each is not None]
        assert codes == [ErrorCode.CONTEXT_LENGTH_EXCEEDED, ErrorCode.MODEL_NOT_FOUND]

    check(body, fim=FIM)


def test_its_sessions_are_cancelled_drained_and_listed_like_the_others() -> None:
    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        head.open(1, model="fim", max_output=200)
        head.open(2, model="m", max_output=3_000)
        await head.until(lambda: len(head.ids(1)) > 2 and len(head.ids(2)) > 2)
        assert {row.session for row in rig.node.service._session_rows()} == {1, 2}
        rig.node.agent.drain(0)
        await head.until(lambda: head.closed(1) and head.closed(2))
        assert all(model.scheduler.stats().draining for model in rig.node.servings)

    check(body, fim=FIM | {"decode_rate": 200.0}, decode_rate=200.0)


def test_every_figure_says_whose_it_is_once_there_are_two() -> None:
    async def body(rig: NodeRig) -> None:
        text = rig.node.metrics.expose().decode()
        assert 'superfluid_lanes{model="m",state="free"} 4.0' in text
        assert 'superfluid_lanes{model="fim",state="free"} 2.0' in text
        figures = rig.node.figures()
        assert figures["scheduler"]["lanes"] == 4
        assert figures["models"]["fim"]["lanes"] == 2

    check(body, fim=FIM)


def find(**flags: str) -> tuple[tuple[tuple[str, ...], int, int], ...]:
    given = {"model": "demo", "engine": "mock", **flags}
    config = build_config(read_settings(given, None), Surroundings(None, None, None, None))
    return tuple((model.names, model.window, model.lanes) for model in find_models(config))


def test_its_size_has_flags_and_its_name_must_be_another() -> None:
    with pytest.raises(ConfigError, match="--fim-model-name"):
        find(fim_model="demo")
    main, fim = find(fim_model="demo", fim_model_name="fim", fim_max_context="512")
    assert fim == (("fim",), 512, 2)
    assert main[2] == 8
    with pytest.raises(ConfigError, match=r"outside 16\.\.8192"):
        find(fim_model="demo", fim_max_context="8193")


def test_a_second_scheduler_has_its_caps_cut_to_its_lanes(tmp_path: Path) -> None:
    del tmp_path

    async def body(rig: NodeRig) -> None:
        head = await rig.link()
        head.open(1, model="fim")
        await head.until(lambda: head.is_finished(1))

    check(body, fim=FIM, flags={"class_lanes": "agent=4", "tenant_lanes": "3"})
