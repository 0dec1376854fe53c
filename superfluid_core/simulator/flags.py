"""The scheduler's own options as one value, and their names on a command line.

Whatever `SchedulerLimits` and `Rules` hold can be set by name, in any scenario; nothing here adds an option to the
scheduler. Beside them stand the pool, the cost model and the service level that goodput is counted by.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

from superfluid_core.errors import ConfigError
from superfluid_core.kv.blocks import PoolShape
from superfluid_core.limits import SchedulerLimits
from superfluid_core.scheduler.rules import Rules
from superfluid_core.session import QosClass

MS = 1_000_000
LIMITS = SchedulerLimits()
RULES = Rules()
POOL = PoolShape(16, 100_000, 1 << 20)


@dataclass(frozen=True, slots=True)
class Flags:
    """Everything but the arrivals. `slo_*` of 0 count any time as good; `unit_ns` is one unit of a cost model."""

    limits: SchedulerLimits = LIMITS
    rules: Rules = RULES
    pool: PoolShape = POOL
    cost: str = "unit"
    unit_ns: int = MS
    slo_ttft_ms: int = 0
    slo_itl_ms: int = 0
    cuts_are_free: bool = False


LIMIT_NAMES = {
    "lanes": "max-batch",
    "queue_max": "max-queue",
    "queued_tokens_max": "max-queued-tokens",
    "decode_budget": "tick-decode-budget",
    "watermark_pct": "watermark",
}
RULE_NAMES = {"queue_order": "queue-policy", "reserve": "kv-reserve"}
POOL_NAMES = {"blocks": "kv-blocks", "window": "max-context"}
OWN_NAMES = ("cost", "unit_ns", "slo_ttft_ms", "slo_itl_ms", "cuts_are_free")


def _flag(field: str, names: dict[str, str]) -> str:
    return names.get(field, field.replace("_", "-"))


def _table() -> dict[str, tuple[str, str]]:
    """Flag name to (part of Flags, field in it); own fields have no part."""
    table: dict[str, tuple[str, str]] = {}
    parts: tuple[tuple[str, type[Any], dict[str, str]], ...] = (
        ("limits", SchedulerLimits, LIMIT_NAMES),
        ("rules", Rules, RULE_NAMES),
        ("pool", PoolShape, POOL_NAMES),
    )
    for part, kind, names in parts:
        for field in fields(kind):
            table[_flag(field.name, names)] = (part, field.name)
    for name in OWN_NAMES:
        table[name.replace("_", "-")] = ("", name)
    return table


FLAG_TABLE = _table()


def set_flag(flags: Flags, name: str, text: str) -> Flags:
    """Return flags with one of them changed. Raises ConfigError for unknown names and bad values."""
    place = FLAG_TABLE.get(name)
    if place is None:
        raise ConfigError(f"unknown flag {name[:40]!r}; known: {', '.join(sorted(FLAG_TABLE))}")
    part, field = place
    holder = getattr(flags, part) if part else flags
    try:
        value = _parse(getattr(holder, field), text)
    except ValueError as error:
        raise ConfigError(f"{name}={text[:60]}: {error}") from error
    change: dict[str, Any] = {field: value}
    if part:
        change = {part: replace(holder, **change)}
    return replace(flags, **change)


def set_flags(flags: Flags, settings: Iterable[tuple[str, str]]) -> Flags:
    for name, value in settings:
        flags = set_flag(flags, name, value)
    return flags


def parse_setting(text: str) -> tuple[str, str]:
    """Cut `name=value`."""
    name, is_cut, value = text.partition("=")
    if not is_cut or not name or not value:
        raise ConfigError(f"{text[:60]!r} is not flag=value")
    return name.strip().removeprefix("--"), value.strip()


def _parse(current: Any, text: str) -> Any:
    """Read `text` as a value of the kind of the current one."""
    if isinstance(current, bool):
        return _switch(text)
    if isinstance(current, StrEnum):
        return _one_of(type(current), text)
    if isinstance(current, int):
        return int(text)
    if isinstance(current, float):
        return float(text)
    if isinstance(current, str):
        return text
    if isinstance(current, tuple):
        pairs = [part.partition("=") for part in text.replace("+", ",").split(",")]
        return tuple((name, int(weight)) for name, _, weight in pairs)
    return _by_class(text)


def _switch(text: str) -> bool:
    known = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}
    if text.lower() not in known:
        raise ValueError("say on or off")
    return known[text.lower()]


def _one_of(kind: type[StrEnum], text: str) -> StrEnum:
    try:
        return kind(text)
    except ValueError as error:
        known = ", ".join(str(each) for each in kind)
        raise ValueError(f"known: {known}") from error


def _by_class(text: str) -> dict[QosClass, int]:
    """Read `background=2+agent=6` (commas separate values in a sweep, so classes are joined with +)."""
    caps: dict[QosClass, int] = {}
    for part in text.replace("+", ",").split(","):
        name, _, count = part.partition("=")
        caps[QosClass.parse(name)] = int(count)
    return caps


def shown(flags: Flags) -> dict[str, str]:
    """Name every flag that differs from the scheduler's defaults, with its value."""
    plain = Flags()
    values: dict[str, str] = {}
    for name, (part, field) in FLAG_TABLE.items():
        value = getattr(getattr(flags, part) if part else flags, field)
        default = getattr(getattr(plain, part) if part else plain, field)
        if value != default:
            values[name] = _text(value)
    return values


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        return "+".join(f"{qos.label}={count}" for qos, count in value.items())
    return str(value)
