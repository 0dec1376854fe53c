"""What a client must read: the simulated engine's law of tokens and the model's text, written down a second time.

Independent of the engine and of the head's text path on purpose (only the model's own files are shared): ids are drawn
here, their bytes are joined and decoded in one piece. A request is one user message, seeded, without an end of text.
"""

from __future__ import annotations

import functools
from array import array
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from superfluid_core.modelfiles.resolve import resolve


@dataclass(frozen=True, slots=True)
class Expected:
    """The whole answer and both of its counts."""

    text: str
    prompt_tokens: int
    completion_tokens: int


class Oracle:
    """Knows every answer of the demo model's mock engine."""

    def __init__(self, engine_seed: int = 0) -> None:
        files = resolve("demo", offline=True)
        self._tokenizer = files.tokenizer()
        template = files.template()
        assert template is not None, "the demo model has a template"
        self._template = template
        eos = set(files.config.eos_ids)
        self._ordinary = [one for one in self._tokenizer.ordinary_ids() if one not in eos]
        self._engine_seed = engine_seed
        self.expect = functools.lru_cache(4096)(self._expect)

    def of(self, body: dict[str, Any]) -> Expected:
        """Answer a body of `load.chat_body`."""
        (message,) = body["messages"]
        seed = 0 if body["temperature"] == 0 else body["seed"]
        return self.expect(message["content"], seed, body["max_completion_tokens"])

    def _expect(self, content: str, seed: int, tokens: int) -> Expected:
        rendered = self._template.render([{"role": "user", "content": content}])
        prompt = rendered.encode(self._tokenizer)
        numbers = (self._engine_seed, seed, 0)
        head = b"".join(value.to_bytes(8, "little") for value in numbers)
        data = head + array("Q", prompt).tobytes()
        key = blake2b(data, digest_size=32, person=b"superfluid-sim").digest()
        ids = [self._token(key, index) for index in range(tokens)]
        spelled = b"".join(self._tokenizer.token_bytes(one) for one in ids)
        return Expected(spelled.decode("utf-8", "replace"), len(prompt), tokens)

    def _token(self, key: bytes, index: int) -> int:
        data = index.to_bytes(8, "little") + bytes(4)
        place = int.from_bytes(blake2b(data, digest_size=24, key=key).digest()[8:16], "little")
        return self._ordinary[place % len(self._ordinary)]


@functools.cache
def oracle() -> Oracle:
    return Oracle()
