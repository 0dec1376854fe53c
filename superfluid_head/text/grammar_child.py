"""The process in which constraints are tried out: it may hang, explode or die, and nobody else does.

Speaks length-prefixed msgpack on stdin and stdout, one question at a time: a vocabulary to keep, a grammar to compile against one
that it has. Limits its own memory before it reads a word. Ends when stdin does. It needs llguidance alone: the vocabulary
comes as bytes, so no tokenizer library is loaded here.
"""

from __future__ import annotations

import resource
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO

import msgpack

from superfluid_core.errors import InvalidRequestError
from superfluid_core.grammar.compiler import Vocabulary, build_tokenizer, compile_source

MEMORY_BYTES = 512 << 20
VOCABULARIES_MAX = 4


def _limit_memory() -> None:
    """Allow this process so much on top of what it has mapped already."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = mapped + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _read(stream: BinaryIO) -> dict[str, Any] | None:
    head = stream.read(4)
    if len(head) < 4:
        return None
    body = stream.read(int.from_bytes(head, "big"))
    found = msgpack.unpackb(body)
    assert isinstance(found, dict), "the parent asks in maps"
    return found


class _Child:
    """Answers one question after the other."""

    def __init__(self) -> None:
        self._tokenizers: OrderedDict[str, Any] = OrderedDict()

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        key = question["key"]
        if "tokens" in question:
            vocabulary = Vocabulary(
                tuple(question["tokens"]), tuple(question["eos"]), frozenset(question["special"])
            )
            self._tokenizers[key] = build_tokenizer(vocabulary)
            while len(self._tokenizers) > VOCABULARIES_MAX:
                self._tokenizers.popitem(last=False)
            return {"refused": None}
        tokenizer = self._tokenizers.get(key)
        if tokenizer is None:
            return {"unknown": True}
        self._tokenizers.move_to_end(key)
        if question.get("gbnf"):
            return {"lark": _converted(question["source"])}
        compile_source(tokenizer, question["source"])
        return {"refused": None}


def _converted(gbnf: str) -> str:
    from llguidance import gbnf_to_lark

    return str(gbnf_to_lark.any_to_lark(gbnf))


def main() -> None:
    """Serve until stdin ends."""
    if sys.platform == "linux":
        _limit_memory()
    child, source, sink = _Child(), sys.stdin.buffer, sys.stdout.buffer
    while (question := _read(source)) is not None:
        try:
            answer = child.answer(question)
        except InvalidRequestError as error:
            answer = {"refused": error.message}
        except Exception as error:  # noqa: BLE001 - a converter of foreign text: it is that text's fault
            answer = {"refused": f"the grammar cannot be read: {str(error).splitlines()[0][:150]}"}
        data = msgpack.packb(answer)
        sink.write(len(data).to_bytes(4, "big") + data)
        sink.flush()


if __name__ == "__main__":
    main()
