"""How request bodies become typed values: strict, null means absent, errors name the member by its path.

Owns the rules G3-G6 of http_api.md for known members. Members that nobody knows are ignored and reported once to the
log; members that are known but not honoured are refused by name, each with the values that change nothing.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import ErrorDetails

from superfluid_core.logs import log
from superfluid_head.api.errors import ApiError, invalid

PATH_CHARS_MAX = 200
UNKNOWN_NAMES_MAX = 256
IDS_MAX = 1 << 20

Harmless = Callable[[Any], bool]
M = TypeVar("M", bound="RequestModel")

_logger = logging.getLogger(__name__)
_unknown_names: set[str] = set()


def _whole(value: Any) -> Any:
    """Take an integral float such as 16.0 as an int (G3)."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return int(value)
    return value


def _finite(value: Any) -> Any:
    """Refuse an int that no double can hold as a number, not as an overflow."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 2**63:
        raise ValueError("the number is too large")
    return value


Int = Annotated[int, BeforeValidator(_whole)]
Float = Annotated[float, BeforeValidator(_finite)]


ID_END = 2**31


def _quick_ids(value: Any, slow: ValidatorFunctionWrapHandler) -> Any:
    """Take what is plainly a list of ids as a whole; one by one they would take a hundred times as long."""
    is_plain = isinstance(value, list) and bool(value) and set(map(type, value)) == {int}
    if is_plain and min(value) >= 0 and max(value) < ID_END:
        return value
    return slow(value)


TokenId = Annotated[Int, Field(ge=0, lt=ID_END)]
TokenIds = Annotated[
    list[TokenId], Field(fail_fast=True, max_length=IDS_MAX), WrapValidator(_quick_ids)
]


def judge_kinds(value: Any, kinds: Sequence[str], what: str) -> Any:
    """Refuse entries of a list that are of a type which is not read here, naming them."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            kind = item.get("type") if isinstance(item, dict) else None
            if isinstance(kind, str) and kind not in kinds:
                words = f"{what} {index} is of type {kind[:40]!r}; read here: {', '.join(kinds)}"
                raise ValueError(words)
    return value


def few(most: int) -> BeforeValidator:
    """Count the members of a dictionary before each is looked at."""

    def judge(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise ValueError(f"at most {most} members are taken")
        return value

    return BeforeValidator(judge)


class RequestModel(BaseModel):
    """Base of everything that a client sends."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {name: value for name, value in data.items() if value is not None}
        return data


# A program of the caller's own runs nowhere, whatever the route (decisions 26): no sibling can forget it.
NEVER: dict[str, Harmless] = {"chat_template": lambda _: False}


class BodyModel(RequestModel):
    """A whole body. `refused` maps members that are not honoured to what is harmless in them."""

    refused: ClassVar[Mapping[str, Harmless]] = {}
    accepted: ClassVar[frozenset[str]] = frozenset()
    """Members without effect on the output."""


def reads(model: type[M]) -> Callable[[dict[str, Any]], M]:
    """Return what makes a `model` of a parsed body."""
    return functools.partial(read_model, model)


def read_model(model: type[M], body: dict[str, Any]) -> M:
    """Validate `body`. Raises ApiError 400 naming the first member at fault."""
    if issubclass(model, BodyModel):
        _refuse(model, body)
        _report_unknown(model, body)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _as_api_error(error, body) from None


def _refuse(model: type[BodyModel], body: Mapping[str, Any]) -> None:
    for name, is_harmless in {**NEVER, **model.refused}.items():
        value = body.get(name)
        if value is not None and not is_harmless(value):
            raise invalid(f"{name} is not supported", param=name, code="unsupported_value")


def _report_unknown(model: type[BodyModel], body: Mapping[str, Any]) -> None:
    for name in body:
        if name in model.model_fields or name in model.refused or name in model.accepted:
            continue
        if name not in _unknown_names and len(_unknown_names) < UNKNOWN_NAMES_MAX:
            _unknown_names.add(name)
            log(_logger, "info", "unknown member ignored", member=name)


def _as_api_error(error: ValidationError, body: Any) -> ApiError:
    details = error.errors(include_url=False, include_input=False, include_context=False)
    first = min(details, key=lambda detail: _rank(detail, body))
    path = _path(first, body)
    words = first["msg"].removeprefix("Value error, ")
    return invalid(f"{path}: {words}" if path else words, param=path, code="invalid_type")


def _rank(detail: ErrorDetails, body: Any) -> int:
    """Prefer the complaint that reached deepest into the body: of a union, it is about the branch that was meant."""
    return -len((_path(detail, body) or "").split("."))


def _path(detail: ErrorDetails, body: Any) -> str | None:
    """Return the location as `messages[2].content`, without the names of union branches and validators."""
    path = ""
    value = body
    for part in detail["loc"]:
        if isinstance(value, dict) and isinstance(part, str):
            is_missing = detail["type"] == "missing" and part is detail["loc"][-1]
            if part in value or is_missing:
                path += f".{part}" if path else part
                value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            path += f"[{part}]"
            value = value[part]
    return path[:PATH_CHARS_MAX] or None
