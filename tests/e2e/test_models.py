"""Several models in one fleet, through real processes: `superfluid serve A B --fleet ...`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from superfluid_core.modelfiles.resolve import resolve
from superfluid_head.bench.load import chat_body
from superfluid_head.bench.rig import Child, Rig
from superfluid_head.bench.small_fleet import wait_linked

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
FAST = ("--engine", "mock", "--mock-rates", "prefill=20000,decode=400", "--mock-eos", "0")


def get(head: Child, path: str) -> Any:
    return httpx.get(f"{head.url}{path}", timeout=10, trust_env=False).json()


def ask(head: Child, model: str) -> httpx.Response:
    body = chat_body(model, "Hello.", 6, ignore_eos=True, stream=False)
    del body["stream_options"]
    url = f"{head.url}/v1/chat/completions"
    return httpx.post(url, json=body, timeout=30, trust_env=False)


def test_several_models_are_listed_and_routed_and_stay_listed_without_a_node(
    rig: Rig, tmp_path: Path
) -> None:
    """The second model is the demo model's file under another name; its node also has a model beside it."""
    other = tmp_path / "other-model.gguf"
    other.symlink_to(resolve("demo").path)
    key = rig.make_key()
    first = rig.start_node("node-a", *FAST, "--model", "demo", "--model-name", "main", key=key)
    beside = ("--fim-model", "demo", "--fim-model-name", "small")
    second = rig.start_node("node-b", *FAST, "--model", str(other), *beside, key=key)
    rig.wait_ready(first, second, timeout_s=45)
    head = rig.start_head("demo", str(other), nodes=[first.listen, second.listen], key=key)
    rig.wait_ready(head, timeout_s=45)
    wait_linked(rig, head, 2)
    listed = {card["id"] for card in get(head, "/v1/models")["data"]}
    assert {"main", "other-model", "small"} <= listed
    for name, node in (("main", "node-a"), ("other-model", "node-b"), ("small", "node-b")):
        reply = ask(head, name)
        assert reply.status_code == 200, reply.text
        assert reply.json()["model"] == name
        assert reply.json()["usage"]["completion_tokens"] == 6
        why = get(head, f"/v1/fleet/requests/{reply.headers['x-request-id']}")
        assert [each["node"] for each in why["placements"]] == [node]
    second.kill()
    assert ask(head, "main").status_code == 200
    assert ask(head, "nobody").status_code == 404
    assert {card["id"] for card in get(head, "/v1/models")["data"]} >= listed
