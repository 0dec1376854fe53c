"""Sampling rows: masks, penalties, minimum length, log-probabilities, and independence of the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from superfluid_core.engine.torch.sampler import (
    NOT_FINITE,
    NOTHING_ALLOWED,
    RUN,
    Sampler,
    best_of_rows,
)
from superfluid_core.grammar.lanes import Mask
from superfluid_core.scheduler.plan import LaneStart
from superfluid_core.session import SamplingParams, SessionKey, SessionSpec

VOCABULARY = 200
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)


def start(
    lane: int,
    sampling: SamplingParams,
    *,
    prompt: Sequence[int] = (1, 2),
    outputs: Sequence[int] = (),
    stop_ids: Sequence[int] = (),
    min_output: int = 0,
    choice: int = 0,
) -> LaneStart:
    spec = SessionSpec(
        key=SessionKey("h", lane),
        model="m",
        prompt=tuple(prompt),
        max_output=100,
        min_output=min_output,
        stop_ids=frozenset(stop_ids),
        sampling=sampling,
        choice=choice,
    )
    return LaneStart(lane, spec, tuple(outputs))


def make(*starts: LaneStart) -> Sampler:
    sampler = Sampler(8, VOCABULARY, CPU)
    for each in starts:
        sampler.start(each)
    return sampler


def ramp(rows: int = 1) -> torch.Tensor:
    """Logits whose best id is 199, then 198 ..."""
    return torch.arange(float(VOCABULARY)).mul(0.1).repeat(rows, 1)


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def test_greedy_takes_the_best_id_and_the_lowest_of_equals() -> None:
    logits = torch.zeros(2, VOCABULARY)
    logits[0, [40, 90]] = 3.0
    logits[1, 150] = 1.0
    sampler = make(start(0, GREEDY), start(1, SamplingParams(temperature=9e-6)))
    assert sampler.sample(logits, [0, 1], [0, 0]).ids == [40, 150]


def test_the_best_of_a_row_is_its_first_largest_in_whole_runs_and_beside_them() -> None:
    for vocabulary in (3 * RUN, 3 * RUN + 5):
        logits = torch.randint(0, 6, (40, vocabulary)).float()  # many are equal
        logits[1, 2 * RUN] = math.nan
        logits[2] = -math.inf
        logits[3, 7] = math.inf
        best, ids = best_of_rows(logits)
        for row, values in enumerate(logits.tolist()):
            if row == 1:
                assert math.isnan(best[row])
            else:
                assert best[row] == max(values)
                assert ids[row] == values.index(max(values))


def test_o23_a_top_k_of_one_is_greedy() -> None:
    logits = random_logits(2)
    only = SamplingParams(temperature=1.5, top_k=1, seed=9)
    ids = make(start(0, only), start(1, GREEDY)).sample(logits.clone(), [0, 1], [0, 0]).ids
    assert ids == logits.argmax(-1).tolist()


def test_greedy_is_the_same_beside_lanes_that_draw() -> None:
    logits = random_logits(3)
    best = logits.argmax(-1).tolist()
    hot = SamplingParams(temperature=2.0, seed=4)
    sampler = make(start(0, hot), start(1, GREEDY), start(2, GREEDY))
    assert sampler.sample(logits.clone(), [0, 1, 2], [0, 0, 0]).ids[1:] == best[1:]


def test_a_draw_does_not_depend_on_its_neighbours_or_on_a_restart() -> None:
    params = [
        SamplingParams(temperature=1.3, seed=11),
        SamplingParams(seed=2**63 + 5, top_p=0.9),
        SamplingParams(seed=11, top_k=7),
        SamplingParams(seed=3, frequency_penalty=0.5, presence_penalty=0.2),
    ]
    together = make(*(start(n, each, choice=n) for n, each in enumerate(params)))
    said: list[list[int]] = [[] for _ in params]
    for index in range(70):
        drawn = together.sample(random_logits(4, index), [0, 1, 2, 3], [index] * 4).ids
        for row, token in zip(said, drawn, strict=True):
            row.append(token)
    for number, each in enumerate(params):
        for first in (0, 33, 69):
            outputs = said[number][:first]
            alone = make(start(5, each, choice=number, outputs=outputs))
            logits = random_logits(4, first)[number : number + 1]
            assert alone.sample(logits, [5], [first]).ids == [said[number][first]]


def test_choices_of_one_seed_differ() -> None:
    logits = torch.zeros(6, VOCABULARY)
    sampler = make(*(start(n, SamplingParams(seed=1), choice=n) for n in range(6)))
    assert len(set(sampler.sample(logits, list(range(6)), [0] * 6).ids)) > 3


def test_allowed_ids_bias_and_bad_words_shape_the_choice() -> None:
    sampler = make(
        start(0, SamplingParams(temperature=0.0, allowed_token_ids=(3, 9, 500))),
        start(1, SamplingParams(temperature=0.0, logit_bias=((5, 100.0), (199, -100.0)))),
        start(2, SamplingParams(temperature=0.0, bad_words=((199,), (198,), ()))),
        start(3, SamplingParams(temperature=0.0, allowed_token_ids=(3, 9), bad_words=((9,),))),
    )
    assert sampler.sample(ramp(4), [0, 1, 2, 3], [0] * 4).ids == [9, 5, 197, 3]


def test_a_bad_word_of_several_ids_bans_only_its_last_id_after_the_others() -> None:
    params = SamplingParams(temperature=0.0, bad_words=((199, 199, 199),))
    sampler = make(start(0, params))
    said = [sampler.sample(ramp(), [0], [index]).ids[0] for index in range(6)]
    assert said == [199, 199, 198, 199, 199, 198]
    resumed = make(start(0, params, outputs=said[:2]))
    assert resumed.sample(ramp(), [0], [2]).ids == [198]


def test_a_bad_word_in_the_prompt_bans_nothing() -> None:
    params = SamplingParams(temperature=0.0, bad_words=((7, 199),))
    assert make(start(0, params, prompt=(7,))).sample(ramp(), [0], [0]).ids == [199]


def test_stop_ids_cannot_be_drawn_below_the_minimum() -> None:
    sampler = make(start(0, GREEDY, stop_ids=(199, 198, 999), min_output=2))
    said = [sampler.sample(ramp(), [0], [index]).ids[0] for index in range(4)]
    assert said == [197, 197, 199, 199]


def test_penalties_follow_their_formulas() -> None:
    params = SamplingParams(
        temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.3, presence_penalty=0.7
    )
    logits = random_logits(1, 9)
    prompt, outputs = [4, 5], [5, 6, 6]
    expected = logits[0].clone()
    for token in {4, 5, 6}:
        value = float(expected[token])
        expected[token] = value / 1.5 if value > 0 else value * 1.5
    for token in (5, 6):
        expected[token] -= 0.3 * outputs.count(token) + 0.7
    sampler = make(start(0, params, prompt=prompt, outputs=outputs))
    sampler.sample(logits, [0], [3])
    torch.testing.assert_close(logits[0], expected)


def test_penalties_count_what_is_sampled_and_are_cleared_for_the_next_session() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=1000.0)
    sampler = make(start(0, params), start(1, GREEDY))
    said = [sampler.sample(ramp(2), [0, 1], [n, n]).ids for n in range(3)]
    assert said == [[199, 199], [198, 199], [197, 199]]
    sampler.free(0)
    assert sampler.lanes() == [1]
    sampler.start(start(0, params))
    assert sampler.sample(ramp(), [0], [0]).ids == [199]


def test_a_row_that_is_not_finite_is_marked_and_the_others_are_drawn() -> None:
    logits = random_logits(4)
    best = logits.argmax(-1).tolist()
    logits[1, 17] = math.nan
    logits[2, 3] = math.inf
    sampler = make(*(start(n, GREEDY) for n in range(3)), start(3, SamplingParams(top_k=1)))
    found = sampler.sample(logits, [0, 1, 2, 3], [0] * 4).ids
    assert found == [best[0], NOT_FINITE, NOT_FINITE, best[3]]
    drawing = make(*(start(n, SamplingParams(seed=n, top_p=0.9)) for n in range(3)))
    logits = random_logits(3)
    logits[1] = math.nan
    found = drawing.sample(logits, [0, 1, 2], [0] * 3).ids
    assert found[1] == NOT_FINITE
    assert min(found[0], found[2]) >= 0


def test_a_row_without_any_allowed_id_is_marked() -> None:
    params = SamplingParams(allowed_token_ids=(7,))
    sampler = make(start(0, params, stop_ids=(7,), min_output=1), start(1, GREEDY))
    assert sampler.sample(ramp(2), [0, 1], [0, 0]).ids == [NOTHING_ALLOWED, 199]


def test_a_grammar_mask_limits_the_choice() -> None:
    mask = Mask(sum(1 << token for token in (12, 40)).to_bytes(VOCABULARY // 8, "little"), False)
    assert make(start(0, GREEDY), start(1, GREEDY)).sample(
        ramp(2), [0, 1], [0, 0], [mask, None]
    ).ids == [40, 199]
    assert make(start(0, GREEDY)).sample(ramp(), [0], [0], [mask]).ids == [40]


def test_logprobs_are_of_the_model_before_anything_is_applied() -> None:
    logits = random_logits(3, 5)
    model = logits.log_softmax(-1)
    sampler = make(
        start(0, SamplingParams(temperature=5.0, logit_bias=((8, 100.0),), logprobs=2)),
        start(1, GREEDY),
        start(2, SamplingParams(temperature=0.0, logprobs=0)),
    )
    sampled = sampler.sample(logits, [0, 1, 2], [0] * 3)
    assert sampled.logprobs is not None
    first, second, third = sampled.logprobs
    assert first is not None
    assert third is not None
    assert second is None
    assert sampled.ids[0] == 8
    assert math.isclose(first.logprob, float(model[0, 8]), rel_tol=1e-5)
    best = model[0].topk(2)
    assert [token for token, _ in first.top] == best.indices.tolist()
    assert third.top == ()
    assert math.isclose(third.logprob, float(model[2].max()), rel_tol=1e-5)
    assert make(start(0, GREEDY)).sample(ramp(), [0], [0]).logprobs is None
