"""Routes for admins: pinned prefixes and the nodes' figures."""

from __future__ import annotations

from typing import Any

import pytest

from superfluid_core.errors import ErrorCode, GenerationError
from superfluid_head.access.keys import KeyRing, Principal
from tests.unit.head_api.conftest import Bench

MESSAGES = [{"role": "system", "content": "Be brief."}]


def test_a_prefix_is_warmed_pinned_and_let_go(bench: Bench) -> None:
    bench.fleet.say("x", cached=4)
    reply = bench.send("POST", "/v1/prefixes", json={"messages": MESSAGES, "ttl_s": 60})
    assert reply.status_code == 200, reply.text
    made = reply.json()
    assert made["id"].startswith("prefix-")
    assert (made["node"], made["warm_tokens"], made["ttl_s"]) == ("n1", 4, 60)
    (warm,) = bench.fleet.requests
    (pin,) = bench.fleet.pins
    assert warm.max_output == 1
    assert warm.prompt == pin.prompt
    assert len(pin.prompt) == made["prompt_tokens"]
    assert (pin.node, pin.tenant, pin.ttl_ms) == ("n1", "anonymous", 60_000)
    assert pin.cache_salt == warm.cache_salt == bench.head.prefix_salt("anonymous", None)
    gone = bench.send("DELETE", f"/v1/prefixes/{made['id']}")
    assert gone.json()["deleted"] is True
    assert len(bench.fleet.unpinned) == 1
    assert bench.send("DELETE", f"/v1/prefixes/{made['id']}").status_code == 404


def test_the_prefix_of_a_chat_is_the_front_of_that_chats_prompt(bench: Bench) -> None:
    bench.send("POST", "/v1/prefixes", json={"messages": MESSAGES})
    user = {"role": "user", "content": "hi"}
    bench.chat(messages=[*MESSAGES, user])
    prefix, chat = bench.fleet.pins[0], bench.fleet.requests[-1]
    assert chat.prompt[: len(prefix.prompt)] == prefix.prompt
    assert chat.cache_salt == prefix.cache_salt


def test_texts_ids_and_other_tenants_may_be_pinned(bench: Bench) -> None:
    bench.send("POST", "/v1/prefixes", json={"prompt": "abc", "tenant": "acme"})
    bench.send("POST", "/v1/prefixes", json={"prompt": [1, 2, 3]})
    first, second = bench.fleet.pins
    assert (first.prompt, first.tenant) == (tuple(b"abc"), "acme")
    assert second.prompt == (1, 2, 3)
    assert first.ttl_ms == 3_600_000


@pytest.mark.parametrize(
    "body",
    [
        {}, {"messages": MESSAGES, "prompt": "x"}, {"prompt": ""}, {"prompt": []}, {"prompt": [5_000]},
        {"prompt": "x", "ttl_s": 0}, {"prompt": "x", "ttl_s": 10_000_000}, {"prompt": "x" * 4_096},
        {"prompt": "x" * 300_000},
    ],
)  # fmt: skip
def test_what_cannot_be_pinned_is_refused(bench: Bench, body: dict[str, Any]) -> None:
    assert bench.send("POST", "/v1/prefixes", json=body).status_code == 400
    assert bench.fleet.pins == []


def test_pins_and_figures_are_for_admins(make_bench: Any) -> None:
    bench = make_bench(keys=KeyRing([("plain-key", Principal("alice"))]))
    headers = {"authorization": "Bearer plain-key"}
    for method, path in (
        ("POST", "/v1/prefixes"), ("DELETE", "/v1/prefixes/p"), ("GET", "/scheduler/stats"),
        ("GET", "/v1/fleet/nodes/n1/stats"),
    ):  # fmt: skip
        reply = bench.send(
            method, path, headers=headers, **({"json": {}} if method == "POST" else {})
        )
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "admin_required")


def test_one_nodes_figures_come_as_they_are(bench: Bench) -> None:
    assert bench.send("GET", "/v1/fleet/nodes/n1/stats").json() == bench.fleet.stats["n1"]
    assert bench.send("GET", "/v1/fleet/nodes/n9/stats").status_code == 404


def test_all_figures_stand_side_by_side_and_silent_nodes_say_why(bench: Bench) -> None:
    from types import SimpleNamespace

    bench.fleet.stats["n2"] = {"scheduler": {"lanes": 3, "lanes_busy": 1, "queued": {"agent": 1}}}
    bench.fleet.stats["n3"] = GenerationError("10.0.0.9 is gone", code=ErrorCode.NODE_LOST)
    names = ["n1", "n2", "n3"]
    nodes = [SimpleNamespace(name=name, is_up=True) for name in names]
    bench.fleet.health = lambda: SimpleNamespace(is_ready=True, nodes=nodes)  # type: ignore[method-assign]
    found = bench.send("GET", "/scheduler/stats").json()
    assert list(found["nodes"]) == names
    assert found["nodes"]["n3"]["error"]["code"] == "node_lost"
    assert found["total"]["lanes"] == 7
    assert found["total"]["lanes_busy"] == 1
    assert found["total"]["queued"] == {
        "interactive": 0,
        "completion": 0,
        "agent": 3,
        "background": 0,
    }
    assert found["head"]["waiting"] == {
        "interactive": 0,
        "completion": 1,
        "agent": 2,
        "background": 3,
    }


def test_the_heads_own_queue_is_a_metric(bench: Bench) -> None:
    text = bench.send("GET", "/metrics").text
    assert 'superfluid_head_queue_depth{class="background"} 3.0' in text
