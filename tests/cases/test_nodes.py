"""Public bug reports that need real nodes behind the head: O-17, O-20, O-23, O-25, O-27. The engine is the simulated one."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.cases.fleet import Asking, asking

WORDS = "x" * 200


def test_o17_n_choices_are_n_under_load_too() -> None:
    async def one(asked: Asking, n: int) -> None:
        reply = (await asked.chat(n=n, temperature=1, max_tokens=4, ignore_eos=True)).json()
        assert sorted(choice["index"] for choice in reply["choices"]) == list(range(n))
        assert all(choice["finish_reason"] == "length" for choice in reply["choices"])
        assert reply["usage"]["completion_tokens"] == 4 * n

    async def crowd(asked: Asking) -> None:
        members: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True}
        reply = (await asked.complete(["a", "b", "c"], n=2, **members)).json()
        assert [choice["index"] for choice in reply["choices"]] == list(range(6))

    async def main() -> None:
        async with asking(nodes=2) as asked, asyncio.TaskGroup() as group:
            for turn in range(20):
                group.create_task(one(asked, 8 if turn % 5 == 0 else 4))
                if turn % 4 == 0:
                    group.create_task(crowd(asked))

    asyncio.run(main())


def test_o23_a_temperature_of_zero_is_the_likeliest_token() -> None:
    async def main() -> None:
        async with asking() as asked:
            members: dict[str, Any] = {
                "max_tokens": 12,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            ids = []
            for extra in ({"temperature": 0}, {"temperature": 0, "seed": 5}, {"temperature": 1e-9}):
                reply = (await asked.chat(**members, **extra)).json()
                ids.append(reply["choices"][0]["token_ids"])
            assert ids[0] == ids[1] == ids[2]
            assert len(ids[0]) == 12

    asyncio.run(main())


async def cached(asked: Asking, **members: Any) -> tuple[int, str]:
    """How much of the prompt was cached, and the text of the answer."""
    reply = await asked.complete(WORDS, max_tokens=4, temperature=0, ignore_eos=True, **members)
    assert reply.status_code == 200, reply.text
    found = reply.json()
    details = found["usage"]["prompt_tokens_details"]
    return details["cached_tokens"], found["choices"][0]["text"]


def test_o25_salts_and_other_names_of_a_model_share_no_cache_and_change_no_answer() -> None:
    async def main() -> None:
        async with asking() as asked:
            salts: list[dict[str, Any]] = [
                {"cache_salt": "t1"},
                {"cache_salt": "t2"},
                {},
                {"cache_salt": "m"},
            ]
            cold = [await cached(asked, **salt) for salt in salts]
            assert [count for count, _ in cold] == [0, 0, 0, 0]
            warm = [await cached(asked, **salt) for salt in salts]
            assert all(count >= len(WORDS) // 2 for count, _ in warm)
            assert {text for _, text in (*cold, *warm)} == {cold[0][1]}
            refused = await asked.complete(WORDS, cache_salt="")
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")

    asyncio.run(main())


def test_o27_what_can_never_fit_is_refused_and_ten_small_ones_behind_it_are_served() -> None:
    async def main() -> None:
        async with asking(blocks=16) as asked, asyncio.TaskGroup() as group:
            big = group.create_task(asked.complete("x" * 300, max_tokens=4))
            small = [
                group.create_task(asked.complete("x" * 50, max_tokens=4, ignore_eos=True))
                for _ in range(10)
            ]
            refused = await big
            assert refused.status_code == 400
            assert refused.json()["error"]["code"] == "context_length_exceeded"
            replies = [await each for each in small]
            assert [reply.status_code for reply in replies] == [200] * 10
            assert all(reply.json()["usage"]["completion_tokens"] == 4 for reply in replies)

    asyncio.run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_o20_a_reader_that_leaves_frees_the_node_at_once(stream: bool) -> None:
    """The application is called as a server does, and told that the connection is gone."""

    async def main() -> None:
        async with asking(decode_rate=50.0) as asked:
            (rig,) = asked.nodes
            stats = rig.node.scheduler.stats
            gone = asyncio.Event()
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": stream,
                    "max_tokens": 3_000, "ignore_eos": True}  # fmt: skip
            sent = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

            async def receive() -> dict[str, Any]:
                if sent:
                    return sent.pop()
                await gone.wait()
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                if gone.is_set():
                    raise OSError

            scope = {
                "type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"", "scheme": "http",
                "raw_path": b"/v1/chat/completions", "headers": [(b"host", b"127.0.0.1:8453")], "http_version": "1.1",
                "client": ("127.0.0.1", 5), "server": ("127.0.0.1", 8453), "asgi": {"version": "3.0"}, "root_path": "",
            }  # fmt: skip
            asked_one = asyncio.ensure_future(asked.bench.app(scope, receive, send))
            await rig.until(lambda: stats().output_tokens > 3)
            gone.set()
            async with asyncio.timeout(5):
                await asyncio.wait({asked_one})
            made = stats().output_tokens
            await rig.until(lambda: stats().lanes_busy == 0)
            assert stats().output_tokens - made < 50  # a second's worth
            assert stats().blocks_used == 0
            assert not rig.node.agent.roster.live
            after = await asked.chat(max_tokens=4, ignore_eos=True)
            assert after.json()["usage"]["completion_tokens"] == 4
            asked_one.exception()

    asyncio.run(main())


def test_o26_greedy_answers_in_a_crowd_are_those_of_a_request_alone() -> None:
    """With the prefix cache warm and cold, and no answer is another's."""

    async def ids(asked: Asking, words: str, **members: Any) -> list[int]:
        reply = await asked.complete(
            words, temperature=0, max_tokens=8, ignore_eos=True, return_token_ids=True, **members
        )
        found: list[int] = reply.json()["choices"][0]["token_ids"]
        return found

    async def main() -> None:
        async with asking() as asked:
            words = [WORDS, *(f"{n} {WORDS}" for n in range(8))]
            alone = [await ids(asked, each, cache_salt=f"s{n}") for n, each in enumerate(words)]
            assert len({tuple(each) for each in alone}) == len(words)
            for salt in ({}, {"cache_salt": "cold"}):
                async with asyncio.TaskGroup() as group:
                    same = [group.create_task(ids(asked, WORDS, **salt)) for _ in range(8)]
                    others = [group.create_task(ids(asked, each, **salt)) for each in words[1:]]
                assert [task.result() for task in same] == [alone[0]] * 8
                assert [task.result() for task in others] == alone[1:]

    asyncio.run(main())
