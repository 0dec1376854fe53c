"""What a session must say: the simulated engine's law of tokens, written down a second time.

Independent of the product's code on purpose: a bug planted there must not change what is expected here.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

from superfluid_core.session import FinishReason
from superfluid_head.fleet.events import GenerationRequest

VOCABULARY = 1024
EOS = VOCABULARY - 1
EOS_PROBABILITY = 0.01


@dataclass(frozen=True, slots=True)
class Expected:
    """The whole output of an unbroken run."""

    ids: tuple[int, ...]
    reason: FinishReason
    stop_id: int | None


def _numbers(key: bytes, index: int, attempt: int) -> tuple[int, int]:
    data = index.to_bytes(8, "little") + attempt.to_bytes(4, "little")
    digest = blake2b(data, digest_size=24, key=key).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")


@lru_cache(maxsize=4096)
def expect(request: GenerationRequest, engine_seed: int) -> Expected:
    """Compute every id of a request on an engine with this seed."""
    numbers = (engine_seed, request.sampling.seed, request.choice)
    head = b"".join(value.to_bytes(8, "little") for value in numbers)
    prompt = array("Q", request.prompt).tobytes()
    key = blake2b(head + prompt, digest_size=32, person=b"superfluid-sim").digest()
    stops = set(request.stop_ids) | (set() if request.ignore_eos else {EOS})
    ids: list[int] = []
    while len(ids) < request.max_output:
        index = len(ids)
        masked = stops if index < request.min_output else set()
        chance, _ = _numbers(key, index, 0)
        if EOS in stops and chance < EOS_PROBABILITY * 2**64 and EOS not in masked:
            token = EOS
        else:
            attempt = 0
            while (token := _numbers(key, index, attempt)[1] % EOS) in masked:
                attempt += 1
        ids.append(token)
        if token in stops:
            return Expected(tuple(ids), FinishReason.STOP, token)
    return Expected(tuple(ids), FinishReason.LENGTH, None)
