"""Which series the dashboards and the alerts ask for, read from their expressions; and what a page of metrics has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from prometheus_client.parser import text_string_to_metric_families

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
RULES = DEPLOY / "alerts" / "superfluid.rules.yml"
TESTS = DEPLOY / "alerts" / "superfluid.test.yml"
CONFIG = DEPLOY / "prometheus.yml"
OF_PROMETHEUS = {"job", "instance"}

_SELECTOR = re.compile(r"\b(up|superfluid_[a-z0-9_]+)\b(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'([a-z_]+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")
_VALUES = re.compile(r"label_values\((.+), ([a-z_]+)\)")


class Expression(NamedTuple):
    """One expression and where it stands."""

    where: str
    text: str

    def selectors(self) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
        """Every metric's name with its matchers: label, operator, value."""
        bare = _GROUPING.sub(" ", self.text)
        for name, matchers in _SELECTOR.findall(bare):
            yield name, _MATCHER.findall(matchers)

    def groupings(self) -> set[str]:
        found = {
            label.strip() for group in _GROUPING.findall(self.text) for label in group.split(",")
        }
        return {label for label in found if label}

    def settled(self) -> str:
        """The expression as Grafana would send it for all heads and nodes."""
        text = self.text.replace("$__rate_interval", "1m")
        return re.sub(r"\$[a-z]+", ".*", text)


def rules() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def panels() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            yield path.stem, panel


def expressions() -> list[Expression]:
    """Every expression of the alerts, the panels and the dashboards' variables."""
    found = [Expression(name, rule["expr"]) for name, rule in rules().items()]
    found += [
        Expression(f"{board}: {panel['title']}", target["expr"])
        for board, panel in panels()
        for target in panel.get("targets", ())
    ]
    for path in DASHBOARDS:
        for variable in json.loads(path.read_text(encoding="utf-8"))["templating"]["list"]:
            asked = (
                _VALUES.fullmatch(variable["query"]["query"])
                if variable["type"] == "query"
                else None
            )
            if asked is not None:
                text = f"count by ({asked[2]}) ({asked[1]})"
                found.append(Expression(f"{path.stem}: ${variable['name']}", text))
    return found


class Series:
    """The series of some pages of metrics: label sets by name."""

    def __init__(self, *pages: str) -> None:
        self.by_name: dict[str, list[dict[str, str]]] = {"up": [{}]}
        for page in pages:
            for family in text_string_to_metric_families(page):
                for sample in family.samples:
                    self.by_name.setdefault(sample.name, []).append(dict(sample.labels))

    def labels(self, name: str) -> set[str]:
        return {label for labels in self.by_name[name] for label in labels} | OF_PROMETHEUS

    def values(self, name: str, label: str) -> set[str]:
        return {labels[label] for labels in self.by_name[name] if label in labels}

    def faults(self, expression: Expression) -> Iterator[str]:
        """What an expression names that is not there."""
        known: set[str] = set()
        for name, matchers in expression.selectors():
            if name not in self.by_name:
                yield f"{expression.where}: no series {name}"
                continue
            known |= self.labels(name)
            for label, operator, value in matchers:
                if label not in self.labels(name):
                    yield f"{expression.where}: {name} has no label {label}"
                elif (
                    operator in ("=", "!=")
                    and label not in OF_PROMETHEUS
                    and value not in self.values(name, label)
                ):
                    yield f"{expression.where}: no series {name}{{{label}={value!r}}}"
        yield from (
            f"{expression.where}: groups by {label}, which nothing there has"
            for label in sorted(expression.groupings() - known)
        )
