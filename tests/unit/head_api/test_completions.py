"""POST /v1/completions: prompts in all forms, echo, best of several, middles, legacy log-probabilities, both modes."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from superfluid_core.engine.scores import unpack_scores
from superfluid_core.engine.stand_ins import hashed_scores
from superfluid_core.errors import InvalidRequestError
from superfluid_core.session import QosClass

EOS = 256
SEPARATOR = 257


def choices(response: Any) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["choices"]
    return found


def error(response: Any) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    found: dict[str, Any] = response.json()["error"]
    return found


def chunks(response: Any) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    lines = [line[6:] for line in response.text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def joined(parts: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Put the choices of a stream together."""
    found: dict[int, dict[str, Any]] = {}
    for part in parts:
        for choice in part["choices"]:
            one = found.setdefault(choice["index"], {"text": "", "lists": {}, "finishes": []})
            assert not one["finishes"], "something came behind the finish chunk"
            one["text"] += choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                one["lists"].setdefault(name, []).extend(values)
            if choice["finish_reason"]:
                one["finishes"].append(choice["finish_reason"])
    return found


def test_a_completion_has_the_shape_of_the_api(bench: Any) -> None:
    reply = bench.complete(max_tokens=8).json()
    assert reply["object"] == "text_completion"
    assert reply["id"].startswith("cmpl-")
    assert reply["model"] == "org/m"
    assert reply["choices"] == [
        {"index": 0, "text": "Hello world", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]  # fmt: skip
    assert reply["usage"] == {
        "prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 2},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [(97, 98)]),
        (["ab", "c"], [(97, 98), (99,)]),
        ([97, 98], [(97, 98)]),
        ([[97], [98, 99]], [(97,), (98, 99)]),
        ("a<|sep|>b", [(97, SEPARATOR, 98)]),
    ],
)
def test_a_prompt_comes_in_four_forms_and_may_spell_control_tokens(
    bench: Any, prompt: Any, ids: list[tuple[int, ...]]
) -> None:
    assert len(choices(bench.complete(prompt=prompt))) == len(ids)
    assert sorted(request.prompt for request in bench.fleet.requests) == sorted(ids)


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [1_000]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
        ({"prompt": "x" * 5_000}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"echo": True, "suffix": "x"}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_a_wrong_member_is_a_400_that_names_it(
    bench: Any, members: dict[str, Any], param: str
) -> None:
    assert error(bench.complete(**members))["param"] == param
    assert not bench.fleet.requests


def test_a_prompt_that_is_too_long_says_both_counts_in_the_known_words(bench: Any) -> None:
    said = error(bench.complete(prompt="x" * 4_000, max_tokens=200))
    assert said["code"] == "context_length_exceeded"
    assert "maximum context length is 4096 tokens" in said["message"]
    assert "4000" in said["message"]
    assert "200" in said["message"]
    assert said["param"] == "prompt"


def test_several_prompts_with_n_give_every_choice_once_in_both_modes(bench: Any) -> None:
    bench.fleet.say("x", "y")
    members = {"prompt": ["a", "b", "c"], "n": 2, "seed": 5}
    whole = choices(bench.complete(**members))
    assert [choice["index"] for choice in whole] == [0, 1, 2, 3, 4, 5]
    asked = [(request.prompt, request.choice) for request in bench.fleet.requests]
    assert sorted(asked) == [((97 + p,), k) for p in range(3) for k in range(2)]
    stream = joined(chunks(bench.complete(**members, stream=True)))
    assert sorted(stream) == [0, 1, 2, 3, 4, 5]
    assert all(one["text"] == "xy" and one["finishes"] == ["stop"] for one in stream.values())
    usage = bench.complete(**members).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 18)


def test_echo_is_the_prompt_and_then_the_text_and_stops_do_not_look_into_it(bench: Any) -> None:
    bench.fleet.say("one ", "two")
    members = {"prompt": "a two b ", "echo": True, "stop": ["two"]}
    (whole,) = choices(bench.complete(**members))
    assert (whole["text"], whole["finish_reason"]) == ("a two b one ", "stop")
    assert joined(chunks(bench.complete(**members, stream=True)))[0]["text"] == "a two b one "
    ids = {"prompt": [[104, 105]], "echo": True}
    assert choices(bench.complete(**ids))[0]["text"].startswith("hi")


def test_an_echo_with_logprobs_tells_those_of_the_prompt_first(bench: Any) -> None:
    """As lm-eval asks: a prompt of ids, one token of output; then more of it, several prompts, and both modes."""
    bench.fleet.say("x", "é", "z")
    members: dict[str, Any] = {
        "prompt": [[104, 195, 169, 105], list(b"ab")],
        "echo": True,
        "logprobs": 2,
        "n": 2,
    }
    for budget in (1, 3):
        found = choices(bench.complete(**members, max_tokens=budget))
        streamed = joined(chunks(bench.complete(**members, max_tokens=budget, stream=True)))
        assert [one["text"] for one in found] == [
            front + "xéz"[:budget] for front in ("héi", "héi", "ab", "ab")
        ]
        for index, one in enumerate(found):
            lists = one["logprobs"]
            ids = members["prompt"][index // 2]
            scores = unpack_scores(hashed_scores(ids, 2, 0, bench.tokenizer.vocabulary), len(ids))
            assert lists["token_logprobs"] == [None, *(s.logprob for s in scores), *[-0.5] * budget]
            assert lists["top_logprobs"][0] is None
            assert [len(best) for best in lists["top_logprobs"][1 : len(ids)]] == [2] * (
                len(ids) - 1
            )
            assert {len(each) for each in lists.values()} == {len(ids) + budget}
            assert streamed[index]["lists"] == lists
            assert streamed[index]["text"] == one["text"]
        assert found[0]["logprobs"]["text_offset"] == [0, 1, 1, 2, 3, 4, 5][: 4 + budget]
    assert {len(each.ids) for each in bench.fleet.embeds} == {2, 4}
    assert len(bench.fleet.embeds) == 8, "a prompt is scored once, whatever n is"


def test_a_prompt_is_scored_without_a_session_and_counted(bench: Any) -> None:
    members = {"prompt": "ab<|sep|>c", "echo": True, "logprobs": 0, "max_tokens": 0}
    response = bench.complete(**members)
    (one,) = choices(response)
    assert (one["text"], one["finish_reason"]) == ("ab<|sep|>c", "length")
    assert one["logprobs"]["tokens"] == ["a", "b", "<|sep|>", "c"]
    assert one["logprobs"]["text_offset"] == [0, 1, 2, 9]
    assert one["logprobs"]["top_logprobs"] == [None] * 4
    assert response.json()["usage"] == {**response.json()["usage"], "prompt_tokens": 4, "completion_tokens": 0}  # fmt: skip
    assert joined(chunks(bench.complete(**members, stream=True)))[0]["lists"] == one["logprobs"]
    assert not bench.fleet.requests
    alone = choices(bench.complete(prompt="a", echo=True, logprobs=1, max_tokens=0))[0]["logprobs"]
    assert alone == {"tokens": ["a"], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}  # fmt: skip


def test_a_prompt_that_cannot_be_scored_fails_before_the_first_byte(bench: Any) -> None:
    bench.fleet.script.error_first = InvalidRequestError("no", param="input")
    for stream in (False, True):
        members = {"echo": True, "logprobs": 1, "stream": stream}
        assert error(bench.complete(**members))["param"] == "prompt"
    assert not bench.fleet.requests


def test_the_echo_alone_asks_no_node(bench: Any) -> None:
    members = {"prompt": ["ab", "c"], "echo": True, "max_tokens": 0}
    response = bench.complete(**members)
    assert [(c["text"], c["finish_reason"]) for c in choices(response)] == [
        ("ab", "length"),
        ("c", "length"),
    ]
    assert response.json()["usage"]["completion_tokens"] == 0
    stream = joined(chunks(bench.complete(**members, stream=True)))
    assert {k: (v["text"], v["finishes"]) for k, v in stream.items()} == {
        0: ("ab", ["length"]),
        1: ("c", ["length"]),
    }
    assert not bench.fleet.requests


def test_legacy_logprobs_are_four_lists_of_one_length_and_the_same_in_both_modes(
    bench: Any,
) -> None:
    bench.fleet.say("ab", b"\xf0\x9f", b"\x98\x80", "c")
    (whole,) = choices(bench.complete(logprobs=2))
    lists = whole["logprobs"]
    assert {len(values) for values in lists.values()} == {4}
    assert lists["tokens"] == ["ab", "\\xf0\\x9f", "\\x98\\x80", "c"]
    assert lists["text_offset"] == [0, 2, 2, 3]
    assert lists["token_logprobs"] == [-0.5] * 4
    assert lists["top_logprobs"][0] == {"ab": -0.5, "A": -1.0}
    assert whole["text"] == "ab😀c"
    stream = joined(chunks(bench.complete(logprobs=2, stream=True)))[0]
    assert stream["lists"] == lists
    (bare,) = choices(bench.complete(logprobs=0))
    assert bare["logprobs"]["top_logprobs"] == [None] * 4
    (named,) = choices(bench.complete(logprobs=1, return_tokens_as_token_ids=True))
    assert named["logprobs"]["tokens"][3] == "token_id:99"


def test_best_of_makes_more_answers_and_shows_the_likeliest(bench: Any) -> None:
    whole = choices(bench.complete(n=1, best_of=3))
    assert len(whole) == 1
    assert whole[0]["logprobs"] is None
    assert len(bench.fleet.requests) == 3
    assert {request.sampling.logprobs for request in bench.fleet.requests} == {0}
    same = bench.complete(n=2, best_of=2, stream=True)
    assert sorted(joined(chunks(same))) == [0, 1]


def test_a_suffix_stands_around_the_models_own_tokens_and_is_a_completion(bench: Any) -> None:
    prefix, suffix, middle = (
        bench.tokenizer.piece(f"<|fim_{name}|>") for name in ("prefix", "suffix", "middle")
    )
    bench.tokenizer.special_ids = frozenset({EOS, SEPARATOR, prefix, suffix, middle})
    bench.fleet.say("x")
    (whole,) = choices(bench.complete(prompt="a<|sep|>", suffix="b"))
    assert whole["text"] == "x"
    (request,) = bench.fleet.requests
    assert request.prompt == (prefix, 97, *b"<|sep|>", suffix, 98, middle)
    assert request.qos is QosClass.COMPLETION
    assert set(request.stop_ids) >= {prefix, suffix, middle}


def test_a_model_without_such_tokens_says_so(bench: Any) -> None:
    said = error(bench.complete(suffix="b"))
    assert said["code"] == "unsupported_value"
    assert "fill-in-the-middle" in said["message"]


def test_null_for_every_optional_member_is_the_default(bench: Any) -> None:
    names = (
        "suffix", "max_tokens", "echo", "logprobs", "n", "best_of", "temperature", "top_p", "stop", "stream",
        "stream_options", "seed", "user", "logit_bias", "presence_penalty", "frequency_penalty", "top_k", "min_p",
        "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "response_format", "guided_json", "cache_salt",
        "truncate_prompt_tokens", "return_token_ids", "add_special_tokens", "allowed_token_ids", "bad_words", "priority",
    )  # fmt: skip
    for name in names:
        response = bench.complete(**{name: None})
        assert response.status_code == 200, (name, response.text)
    assert {request.max_output for request in bench.fleet.requests} == {16}


def test_usage_and_token_ids_are_those_of_every_mode(bench: Any) -> None:
    bench.fleet.say("a", "b", "c")
    members = {"return_token_ids": True, "stop": ["zz"]}
    (whole,) = choices(bench.complete(**members))
    assert whole["token_ids"] == [97, 98, 99, EOS]
    assert whole["prompt_token_ids"] == [104, 105]
    parts = chunks(
        bench.complete(**members, stream=True, stream_options={"continuous_usage_stats": True})
    )
    told = [token for part in parts for choice in part["choices"] for token in choice.get("token_ids", ())]  # fmt: skip
    assert told == [97, 98, 99, EOS]
    assert parts[0]["choices"][0]["prompt_token_ids"] == [104, 105]
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    last = chunks(bench.complete(stream=True, stream_options={"include_usage": True}))[-1]
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 6
    chat = bench.chat(return_token_ids=True).json()
    assert chat["choices"][0]["token_ids"] == [97, 98, 99, EOS]
    assert chat["prompt_token_ids"] == [*b"user:hi", SEPARATOR]


def test_only_the_end_of_a_prompt_is_kept_when_asked(bench: Any) -> None:
    bench.complete(prompt="abcdef", truncate_prompt_tokens=2)
    bench.chat(truncate_prompt_tokens=3)
    assert bench.fleet.requests[0].prompt == (101, 102)
    assert bench.fleet.requests[1].prompt == (104, 105, SEPARATOR)


def test_the_official_client_gets_completions_whole_and_streamed(live: Any) -> None:
    client = openai.OpenAI(base_url=live.url + "/v1", api_key="k", max_retries=0)
    whole = client.completions.create(model="org/m", prompt="hi", logprobs=1, n=2)
    assert [choice.text for choice in whole.choices] == ["Hello world"] * 2
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.text_offset == [0, 5]
    stream = client.completions.create(
        model="org/m", prompt="hi", stream=True, stream_options={"include_usage": True}
    )
    parts = list(stream)
    assert "".join(p.choices[0].text for p in parts if p.choices) == "Hello world"
    assert parts[-1].usage is not None
    assert parts[-1].usage.completion_tokens == 3
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="org/m", prompt="hi", suffix="x")
    assert caught.value.param == "suffix"
    client.close()
