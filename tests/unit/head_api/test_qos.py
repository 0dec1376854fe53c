"""As what a request is served: header, key, default; who may be alone; completions that must start in time."""

from __future__ import annotations

from typing import Any

import pytest

from superfluid_core.clock import SECOND
from superfluid_core.errors import ErrorCode, GenerationError
from superfluid_core.session import QosClass
from superfluid_head.access.keys import ANONYMOUS, KeyRing, Principal
from superfluid_head.access.ratelimit import RateLimit
from superfluid_head.api.qos import QosDesk, QosRules, client_of
from tests.unit.head_api.conftest import Bench, chat_body

KEY = "secret-key-1"
EDITOR = Principal("editor", qos=QosClass.BACKGROUND, max_qos=QosClass.AGENT)


def keyed(principal: Principal) -> dict[str, Any]:
    return {"keys": KeyRing([(KEY, principal)])}


def ask(bench: Bench, key: bool = False, **headers: str) -> Any:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    if key:
        sent["authorization"] = f"Bearer {KEY}"
    return bench.send("POST", "/v1/chat/completions", json=chat_body(), headers=sent)


@pytest.mark.parametrize(
    ("text", "qos"),
    [("interactive", 0), ("Inline-Completion", 1), (" foreground-agent ", 2), ("3", 3), ("BACKGROUND", 3)],
)  # fmt: skip
def test_names_aliases_and_digits_cross_to_the_fleet(bench: Bench, text: str, qos: int) -> None:
    assert ask(bench, x_superfluid_qos=text).status_code == 200
    assert bench.fleet.requests[-1].qos is QosClass(qos)


def test_an_unknown_name_is_refused_with_the_list(bench: Bench) -> None:
    reply = ask(bench, x_superfluid_qos="urgent")
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert "interactive, completion, agent, background" in error["message"]
    assert error["param"] == "x-superfluid-qos"
    assert bench.fleet.requests == []


def test_without_a_header_the_default_counts(make_bench: Any) -> None:
    bench = make_bench(qos=QosDesk(QosRules(default=QosClass.INTERACTIVE)))
    ask(bench)
    assert bench.fleet.requests[-1].qos is QosClass.INTERACTIVE
    plain = make_bench()
    ask(plain)
    assert plain.fleet.requests[-1].qos is QosClass.AGENT


def test_a_switched_off_header_is_ignored_whatever_it_says(make_bench: Any) -> None:
    bench = make_bench(qos=QosDesk(QosRules(has_header=False)))
    assert ask(bench, x_superfluid_qos="nonsense").status_code == 200
    ask(bench, x_superfluid_qos="interactive")
    assert bench.fleet.requests[-1].qos is QosClass.AGENT


def test_a_key_has_a_class_and_a_ceiling_even_when_headers_are_off(make_bench: Any) -> None:
    bench = make_bench(qos=QosDesk(QosRules(has_header=False)), **keyed(EDITOR))
    ask(bench, key=True)
    ask(bench, key=True, x_superfluid_qos="agent")
    classes = [request.qos for request in bench.fleet.requests]
    assert classes == [QosClass.BACKGROUND, QosClass.AGENT]
    reply = ask(bench, key=True, x_superfluid_qos="interactive")
    assert reply.status_code == 403
    assert reply.json()["error"]["code"] == "class_not_allowed"
    assert reply.json()["error"]["type"] == "permission_error"


def test_a_lane_of_ones_own_needs_leave(make_bench: Any) -> None:
    bench = make_bench()
    reply = ask(bench, x_superfluid_batch_invariant="true")
    assert (reply.status_code, reply.json()["error"]["code"]) == (
        403,
        "batch_invariant_not_allowed",
    )
    assert ask(bench, x_superfluid_batch_invariant="false").status_code == 200
    assert ask(bench, x_superfluid_batch_invariant="perhaps").status_code == 400
    allowed = make_bench(qos=QosDesk(QosRules(may_be_alone=True)))
    assert ask(allowed, x_superfluid_batch_invariant="true").status_code == 200
    assert allowed.fleet.requests[-1].batch_invariant
    granted = make_bench(**keyed(Principal("prover", batch_invariant=True)))
    assert ask(granted, key=True, x_superfluid_batch_invariant="1").status_code == 200


def test_engines_that_cannot_are_the_requests_fault(make_bench: Any) -> None:
    from superfluid_core.errors import InvalidRequestError

    bench = make_bench(qos=QosDesk(QosRules(may_be_alone=True)))
    words = "the engine of this node has no batch-invariant lanes"
    bench.fleet.script.error_first = InvalidRequestError(words, code=ErrorCode.UNSUPPORTED)
    reply = ask(bench, x_superfluid_batch_invariant="true")
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "unsupported_value")


def test_whole_replies_say_how_much_was_warm(bench: Bench) -> None:
    bench.fleet.say("ok", cached=5)
    assert bench.chat().headers["x-superfluid-warm"] == "5"
    bench.fleet.say("ok", cached=5_000)
    reply = bench.chat()
    assert reply.headers["x-superfluid-warm"] == str(reply.json()["usage"]["prompt_tokens"])


def test_too_many_completions_of_one_client_wait_as_long_as_told(make_bench: Any) -> None:
    rules = QosRules(completions=RateLimit(0.5, 3), completion_deadline_ms=700)
    bench = make_bench(qos=QosDesk(rules))
    replies = [ask(bench, x_superfluid_qos="completion") for _ in range(4)]
    assert [reply.status_code for reply in replies] == [200, 200, 200, 429]
    assert replies[-1].json()["error"]["code"] == "rate_limit_exceeded"
    assert replies[-1].headers["retry-after"] == "2"
    assert ask(bench).status_code == 200
    request = bench.fleet.requests[0]
    now_ns = bench.head.clock.now_ns()
    assert request.start_by_ns is not None
    assert -10 * SECOND < request.start_by_ns - now_ns < SECOND
    assert bench.fleet.requests[-1].start_by_ns is None


def test_clients_are_keys_or_addresses() -> None:
    assert client_of(EDITOR, "10.0.0.1") == "editor"
    assert client_of(ANONYMOUS, "10.0.0.1") != client_of(ANONYMOUS, "10.0.0.2")


def test_a_completion_that_did_not_start_in_time_is_not_asked_for_again(bench: Bench) -> None:
    late = GenerationError("the request did not start in time", code=ErrorCode.DEADLINE_EXCEEDED)
    bench.fleet.script.error_first = late
    reply = ask(bench, x_superfluid_qos="completion")
    assert reply.status_code == 408
    assert reply.json()["error"]["code"] == "deadline_exceeded"
    assert reply.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("code", "hint_ms", "status", "seconds"),
    [
        (ErrorCode.QUEUE_FULL, 30_500, 429, "31"), (ErrorCode.QUEUE_FULL, 600_000, 429, "120"),
        (ErrorCode.QUEUE_FULL, None, 429, "1"), (ErrorCode.SLO_UNATTAINABLE, 2_000, 429, "2"),
        (ErrorCode.CONTEXT_LENGTH_EXCEEDED, 2_000, 400, None),
    ],
)  # fmt: skip
def test_gates_answer_as_http_and_what_never_fits_invites_no_retry(
    bench: Bench, code: ErrorCode, hint_ms: int | None, status: int, seconds: str | None
) -> None:
    from superfluid_core.errors import SuperfluidError

    error = SuperfluidError("no", code=code, retryable=True, retry_after_ms=hint_ms)
    bench.fleet.script.error_first = error
    reply = ask(bench)
    assert (reply.status_code, reply.headers.get("retry-after")) == (status, seconds)
    assert reply.json()["error"]["code"] == code.value


def test_shared_prefixes_are_not_kept_apart_by_tenant(make_bench: Any) -> None:
    shared = make_bench(prefix_shared=True).head
    apart = make_bench().head
    assert shared.prefix_salt("a", None) == shared.prefix_salt("b", None) == b""
    assert shared.prefix_salt("a", "s") == shared.prefix_salt("b", "s") != b""
    assert apart.prefix_salt("a", None) != apart.prefix_salt("b", None)
