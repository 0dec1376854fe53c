"""Names of blocks: equal for equal fronts under equal roots, different for anything else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from superfluid_core.blockhash import HASH_BYTES, block_chain, block_hash, root_hash

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_the_names_are_stable_across_processes_and_releases() -> None:
    root = root_hash(b"salt", tenant="t", cache_salt=b"c")
    assert root.hex() == "a4e77c97aa891bb12ec2a44202e77b93"
    assert block_hash(root, [1, 2, 3, 4]).hex() == "3d3a706ab83c51a13152f3606d544733"


def test_a_partly_filled_block_has_no_name() -> None:
    root = root_hash(b"")
    assert [len(block_chain(root, [1] * count, 4)) for count in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


@given(TOKENS, TOKENS, st.integers(1, 8))
def test_two_chains_agree_exactly_as_far_as_the_tokens_do(
    one: list[int], two: list[int], size: int
) -> None:
    root = root_hash(b"s")
    first, second = block_chain(root, one, size), block_chain(root, two, size)
    for index, (left, right) in enumerate(zip(first, second, strict=False)):
        end = (index + 1) * size
        assert (left == right) is (one[:end] == two[:end])
        assert len(left) == HASH_BYTES


def test_roots_differ_by_salt_tenant_cache_salt_and_path_and_by_where_they_are_split() -> None:
    roots = [
        root_hash(b""),
        root_hash(b"a"),
        root_hash(b"", tenant="a"),
        root_hash(b"", cache_salt=b"a"),
        root_hash(b"", variant="a"),
        root_hash(b"a", tenant="b"),
        root_hash(b"ab"),
        root_hash(b"", tenant="ab"),
    ]
    assert len(set(roots)) == len(roots)


def test_a_name_depends_on_the_parent() -> None:
    assert block_hash(b"a" * 16, [1]) != block_hash(b"b" * 16, [1])
