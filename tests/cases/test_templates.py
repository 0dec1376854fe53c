"""O-13: roles that a template refuses. Its own sentence reaches the caller once, in both modes, and no node is asked."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases.talk import talking

ALTERNATE = "Conversation roles must alternate user/assistant/user/assistant/..."
MISTRAL_LIKE = """{{ bos_token }}{% for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{%- if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}{% elif message.role == 'assistant' %}{{ message.content + eos_token }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"""


def turn(role: str, content: str = "x") -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([turn("system"), turn("user")], ALTERNATE),
        ([turn("user"), turn("user")], ALTERNATE),
        ([turn("assistant"), turn("user")], ALTERNATE),
        ([turn("user"), turn("system")], "Only user and assistant roles are supported!"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_o13_a_conversation_that_a_template_refuses_is_a_400_in_its_words(
    messages: list[dict[str, Any]], words: str, stream: bool
) -> None:
    with talking("mistral", MISTRAL_LIKE) as bench:
        response = bench.chat(messages=messages, stream=stream)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["code"], error["type"]) == ("template_error", "invalid_request_error")
        assert error["message"].count(words) == 1
        assert not bench.fleet.requests
        fine = [turn("user"), turn("assistant"), turn("user")]
        assert bench.chat(messages=fine, stream=stream).status_code == 200
