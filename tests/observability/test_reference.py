"""The reference of metrics is the registries' own, and every family says what it is."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from tests.observability.reference import PAGE, head_registry, node_registry, page, rows


def test_the_reference_of_metrics_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "run: python -m tests.observability.reference"
    )


def both() -> tuple[tuple[str, CollectorRegistry], ...]:
    return ("superfluid_head_", head_registry()), ("superfluid_", node_registry())


def test_every_family_has_words_of_its_own_and_the_prefix_of_its_program() -> None:
    for prefix, registry in both():
        for row in rows(registry):
            assert row.name.startswith(prefix)
            assert row.text.endswith(".")
            assert row.text.strip(".") not in (row.name, row.name.removesuffix("_total"))


def test_no_family_of_a_node_looks_like_one_of_a_head() -> None:
    assert not [row.name for row in rows(node_registry()) if row.name.startswith("superfluid_head")]
