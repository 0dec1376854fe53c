"""Block reports: order, bounds, and the longest prefix of each node, held against a walk over the blocks."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from superfluid_core.blockhash import block_chain, root_hash
from superfluid_core.limits import WireLimits
from superfluid_core.placement.prefix import PrefixIndex
from superfluid_core.wire.messages import Prefix
from superfluid_core.wire.pieces import split_prefix

ROOT = root_hash(b"salt", tenant="t")
CHAIN = block_chain(ROOT, range(64 * 16), 16)


def snapshot(*blocks: bytes, sequence: int = 1) -> Prefix:
    return Prefix(sequence, 0, 1, True, blocks, ())


def delta(sequence: int, added: Any = (), removed: Any = ()) -> Prefix:
    return Prefix(sequence, 0, 1, False, tuple(added), tuple(removed))


def index(*names: str, blocks_max: int = 1_000) -> PrefixIndex:
    made = PrefixIndex()
    for name in names:
        made.attach(name, blocks_max)
    return made


def test_each_node_is_found_with_the_leading_blocks_that_it_holds() -> None:
    known = index("a", "b", "c", "d")
    known.fold("a", snapshot(*CHAIN[:5]))
    known.fold("b", snapshot(*CHAIN[:64]))
    known.fold("c", snapshot(*block_chain(root_hash(b"salt", tenant="other"), range(64), 16)))
    assert known.depths(CHAIN) == {"a": 5, "b": 64}
    assert known.depths(CHAIN[:3]) == {"a": 3, "b": 3}
    assert known.depths([]) == {}


def test_changes_follow_a_snapshot_and_another_snapshot_replaces_everything() -> None:
    known = index("a")
    assert known.fold("a", snapshot(*CHAIN[:4], sequence=7))
    assert known.fold("a", delta(8, CHAIN[4:6]))
    assert known.fold("a", delta(9, (), CHAIN[3:6]))
    assert known.depths(CHAIN) == {"a": 3}
    assert known.fold("a", snapshot(CHAIN[0], sequence=1))
    assert known.depths(CHAIN) == {"a": 1}
    assert len(known) == 1


def test_a_gap_in_the_sequence_drops_that_node_until_its_next_snapshot() -> None:
    known = index("a", "b")
    known.fold("a", snapshot(*CHAIN[:4]))
    known.fold("b", snapshot(*CHAIN[:2]))
    assert not known.fold("a", delta(3, CHAIN[4:5]))
    assert known.depths(CHAIN) == {"b": 2}
    assert known.fold("a", delta(4, CHAIN[4:5])), "told once, then silently ignored"
    assert known.depths(CHAIN) == {"b": 2}
    assert known.fold("a", snapshot(*CHAIN[:3], sequence=5))
    assert known.depths(CHAIN) == {"a": 3, "b": 2}


def test_a_report_in_pieces_counts_when_it_is_whole_and_not_before() -> None:
    known = index("a", blocks_max=100_000)
    limits = WireLimits(prefix_bytes_max=4 * 1024 + 16 * 10)
    pieces = split_prefix(3, CHAIN[:25], (), limits, snapshot=True)
    assert len(pieces) == 3
    for piece in pieces[:-1]:
        assert known.fold("a", piece)
        assert known.depths(CHAIN) == {}
    assert known.fold("a", pieces[-1])
    assert known.depths(CHAIN) == {"a": 25}
    assert not known.fold("a", pieces[1]), "a piece out of order"
    assert known.depths(CHAIN) == {}


def test_more_blocks_than_a_node_has_are_not_kept() -> None:
    known = index("a", blocks_max=4)
    assert known.fold("a", snapshot(*CHAIN[:4]))
    assert not known.fold("a", delta(2, CHAIN[4:5]))
    assert (known.blocks("a"), len(known)) == (0, 0)
    many = tuple(bytes([n]) * 16 for n in range(9))
    assert not known.fold("a", Prefix(3, 0, 2, True, many, ()))
    assert len(known) == 0


def test_a_node_that_left_leaves_nothing_and_its_place_is_used_again() -> None:
    known = index("a", "b")
    known.fold("a", snapshot(*CHAIN[:4]))
    known.fold("b", snapshot(*CHAIN[:2]))
    known.detach("a")
    assert known.depths(CHAIN) == {"b": 2}
    assert known.fold("a", snapshot(*CHAIN)), "nobody asked"
    known.attach("c", 10)
    assert known.depths(CHAIN) == {"b": 2}
    known.fold("c", snapshot(*CHAIN[:3]))
    assert known.depths(CHAIN) == {"b": 2, "c": 3}


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.integers(0, 40), st.integers(0, 2)), max_size=30
    )
)
def test_halving_finds_what_walking_finds(steps: Any) -> None:
    """Nodes grow and shrink at the end of two chains that part in the middle."""
    other = CHAIN[:20] + block_chain(CHAIN[19], range(5_000, 5_000 + 30 * 16), 16)
    known = index(*"abcdef")
    held: dict[str, list[int]] = {name: [0, 0] for name in "abcdef"}
    sequence = dict.fromkeys("abcdef", 0)

    def blocks(name: str) -> set[bytes]:
        return set(CHAIN[: held[name][0]]) | set(other[: held[name][1]])

    for name in "abcdef":
        known.fold(name, snapshot(sequence=0))
    for name, length, which in steps:
        before = blocks(name)
        held[name][which % 2] = length
        after = blocks(name)
        sequence[name] += 1
        assert known.fold(name, delta(sequence[name], after - before, before - after))
        for chain in (CHAIN, other):
            walked = {}
            for each in "abcdef":
                depth = 0
                while depth < len(chain) and chain[depth] in blocks(each):
                    depth += 1
                if depth:
                    walked[each] = depth
            assert known.depths(chain) == walked
