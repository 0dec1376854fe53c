"""The torch engine under grammars: valid ends, neighbours that are untouched, resumption, and faults of one lane."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from superfluid_core.engine.sim import NumberedTexts
from superfluid_core.engine.torch.build import TorchOptions, build_torch_engine
from superfluid_core.engine.torch.drive import Driver
from superfluid_core.engine.torch.engine import TorchEngine
from superfluid_core.engine.torch.masks import GrammarMasks
from superfluid_core.errors import ErrorCode
from superfluid_core.grammar.compiler import Grammars, vocabulary_of
from superfluid_core.grammar.lanes import Mask
from superfluid_core.session import Grammar, GrammarKind, SamplingParams
from tests.unit.engine_torch.box import Box, spec
from tests.unit.engine_torch.conftest import files_of

TEXTS = NumberedTexts(300)
END = 299
PROMPT = (5, 6, 7, 8, 9, 10, 11)
SAMPLED = SamplingParams(temperature=1.5, seed=3)
PLATE = Grammar(GrammarKind.REGEX, "[A-Z]{2}-[0-9]{3}(x|yy)?")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a", "n"],
    "additionalProperties": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(tiny: Callable[[str], tuple[Path, Any]]) -> TorchEngine:
    options = TorchOptions(device="cpu", dtype="float32", threads=1, lanes=4, kv_blocks=64)
    grammars = Grammars(lambda: vocabulary_of(TEXTS, 300))
    return build_torch_engine(files_of(tiny("llama")[0]), options, grammars=grammars)


def held(number: int, grammar: Grammar, sampling: SamplingParams = SAMPLED, **more: Any) -> Any:
    ends = frozenset({END})
    return spec(number, PROMPT, 60, grammar=grammar, stop_ids=ends, sampling=sampling, **more)


def text_of(ids: list[int]) -> str:
    assert ids[-1] == END
    return bytes(ids[:-1]).decode()


def test_the_engine_says_that_it_can(engine: TorchEngine) -> None:
    assert engine.describe().capabilities.structured_output


def test_answers_obey_greedy_sampled_and_batch_invariant_alike(engine: TorchEngine) -> None:
    box = Box(engine)
    schema = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
    box.submit(
        held(1, PLATE),
        held(2, PLATE, SamplingParams(temperature=0.0)),
        held(3, schema),
        held(4, schema, batch_invariant=True),
    )
    box.finish(1, 2, 3, 4)
    for number in (1, 2):
        assert re.fullmatch("[A-Z]{2}-[0-9]{3}(x|yy)?", text_of(box.outputs[number]))
    for number in (3, 4):
        assert set(json.loads(text_of(box.outputs[number]))) == {"a", "n"}


def test_rows_without_a_grammar_draw_what_they_draw_without_such_neighbours(
    engine: TorchEngine,
) -> None:
    plain = [spec(n, (n, 2, 3, 4), 12, sampling=SamplingParams(seed=n)) for n in (1, 2)]
    alone = Box(engine)
    alone.submit(*plain)
    alone.finish(1, 2)
    mixed = Box(engine)
    mixed.submit(plain[0], held(7, PLATE), plain[1])
    mixed.finish(1, 2, 7)
    assert [mixed.outputs[n] for n in (1, 2)] == [alone.outputs[n] for n in (1, 2)]


def test_a_session_that_is_resumed_at_any_token_ends_as_if_it_had_not_been(
    engine: TorchEngine,
) -> None:
    whole = Box(engine)
    whole.submit(held(1, PLATE))
    whole.finish(1)
    ids = whole.outputs[1]
    again = Box(engine)
    for cut in range(1, len(ids)):
        again.submit(held(cut, PLATE, delivered=tuple(ids[:cut])))
    again.finish(*range(1, len(ids)))
    assert all(again.outputs[cut] == ids for cut in range(1, len(ids)))


def test_faults_of_a_constraint_end_its_own_lane(engine: TorchEngine) -> None:
    driver = Driver(engine)
    wrong = driver.open_spec(held(1, Grammar(GrammarKind.REGEX, "*")))
    replayed = driver.open_spec(held(2, PLATE, delivered=tuple(b"nonsense")))
    narrow = SamplingParams(allowed_token_ids=(ord("z"),))
    empty = driver.open_spec(held(3, PLATE, narrow))
    good = driver.open_spec(held(4, PLATE))
    driver.finish()
    codes = [None if each.fault is None else each.fault.code for each in (wrong, replayed, empty)]
    assert codes == [
        ErrorCode.INVALID_GRAMMAR,
        ErrorCode.GRAMMAR_REPLAY,
        ErrorCode.INVALID_REQUEST,
    ]
    assert text_of(good.outputs)
    for session in (wrong, replayed, empty, good):
        driver.close(session)


def test_masks_touch_their_rows_only_and_nothing_behind_their_end() -> None:
    masks = GrammarMasks(20, torch.device("cpu"))
    logits = torch.arange(60, dtype=torch.float32).view(3, 20)
    before = logits.clone()
    mask = Mask(bytes([0b0000_0101, 0b1000_0000]), False)
    masks.apply(logits, [None, mask, None])
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    assert logits[1].isfinite().nonzero().flatten().tolist() == [0, 2, 15]
    assert torch.equal(logits[1, [0, 2, 15]], before[1, [0, 2, 15]])
    masks.apply(logits, [mask, mask, mask])
    assert logits.isfinite().sum().item() == 9
