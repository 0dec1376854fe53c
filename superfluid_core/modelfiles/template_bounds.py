"""The sandbox of chat templates, with a bound on what one rendering may do.

Owns the budget: steps (turns of loops, calls, elements that filters walk over) and characters that are made on the way. A
template is a stranger's program and nothing stops a thread, so whatever can repeat or grow pays before it does: loops by a
meter that is put around what they walk over, operators, calls and filters by the hooks of the sandbox. Bounds are counts,
not times: the same template and conversation are refused on every machine, or on none. Knows no chat.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

STEPS_MAX = 2_000_000
CALL_STEPS = 10
LOOK_STEPS = 3
ELEMENT_CHARS = 16
CHARS_MAX = 256 << 20
TEXT_CHARS_MAX = 64 << 20
NUMBER_MAX = 1 << 40

_WIDE = re.compile(r"[0-9]{6}")
_SIZED = (str, list, tuple, dict, range)


class TemplateTooBusyError(jinja2.TemplateError):
    """Raised inside a rendering that has used up its budget."""


@dataclass(slots=True)
class Budget:
    """What is left to one rendering."""

    steps: int = STEPS_MAX
    chars: int = CHARS_MAX

    def step(self, count: int = 1) -> None:
        self.steps -= count
        if self.steps < 0:
            raise TemplateTooBusyError("the chat template does too much")

    def make(self, chars: int) -> None:
        """Pay for a text before it is made."""
        self.chars -= chars
        if self.chars < 0 or chars > TEXT_CHARS_MAX:
            raise TemplateTooBusyError("the chat template makes too long a text")


_budget: ContextVar[Budget] = ContextVar("template_budget")


@contextmanager
def budgeted(budget: Budget | None = None) -> Iterator[None]:
    """Give what is compiled or rendered inside a budget of its own."""
    token = _budget.set(budget or Budget())
    try:
        yield
    finally:
        _budget.reset(token)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, _SIZED) else 1


def _weight(value: Any) -> int:
    """Memory in characters: an element of a list takes more than one of a text."""
    return _size(value) if isinstance(value, str) else ELEMENT_CHARS * _size(value)


def _times(left: Any, right: Any) -> None:
    """Pay for `left * right`."""
    if isinstance(left, int) and isinstance(right, int):
        if abs(left) > NUMBER_MAX or abs(right) > NUMBER_MAX:
            raise TemplateTooBusyError("the chat template makes too large a number")
        return
    for value, times in ((left, right), (right, left)):
        if isinstance(value, _SIZED) and isinstance(times, int):
            _budget.get().make(_weight(value) * max(0, times))


def _pay_operator(operator: str, left: Any, right: Any) -> None:
    if operator == "*":
        _times(left, right)
    elif operator == "**":
        if not (isinstance(left, int | float) and isinstance(right, int | float)):
            return
        if abs(left) > 1_000 or abs(right) > 12:
            raise TemplateTooBusyError("the chat template makes too large a number")
    elif operator == "%" and isinstance(left, str):
        _pay_format(left)
        _budget.get().make(len(left) + _shown_size(right))
    elif operator == "+" and isinstance(left, _SIZED):
        _budget.get().make(_weight(left) + _weight(right))


def _pay_format(text: str) -> None:
    if _WIDE.search(text):
        raise TemplateTooBusyError("the chat template pads a text too far")


def _shown_size(value: Any) -> int:
    """About the characters of a value when it is shown, its parts included one level deep."""
    parts = value.values() if isinstance(value, dict) else value
    nested = sum(map(_size, parts)) if isinstance(value, list | tuple | dict) else 0
    return _size(value) + nested


def _pay_call(name: str, subject: Any, arguments: tuple[Any, ...]) -> None:
    """Pay for calling a method of `subject`, or a filter on it, with `arguments`."""
    budget = _budget.get()
    budget.step(CALL_STEPS + _size(subject) // 64 + sum(map(_size, arguments)) // 64)
    for one in arguments:
        if isinstance(one, int) and not isinstance(one, bool):
            budget.make(min(abs(one), 1 << 62) if name in _PADDING else 0)
    texts = [one for one in arguments if isinstance(one, str)]
    if name == "replace" and isinstance(subject, str) and len(texts) >= 2:
        found = subject.count(texts[0]) if texts[0] else len(subject) + 1
        budget.make(len(subject) + found * len(texts[1]))
    elif name == "join":
        parts = arguments[0] if isinstance(subject, str) and arguments else subject
        _pay_join(parts, subject if parts is not subject else (texts or [""])[0])
    elif name in ("format", "format_map") and isinstance(subject, str):
        _pay_format(subject)
        budget.make(len(subject) + sum(map(_shown_size, arguments)))
    elif name == "indent" and isinstance(subject, str):
        width = next((one for one in arguments if isinstance(one, int | str)), 4)
        budget.make(len(subject) + subject.count("\n") * _width(width))
    else:
        budget.make(_size(subject) if isinstance(subject, str) else 0)


_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "wordwrap", "truncate"})


def _width(value: int | str) -> int:
    return len(value) if isinstance(value, str) else min(abs(value), 1 << 62)


def _pay_join(parts: Any, between: str) -> None:
    if not isinstance(parts, list | tuple | dict):
        return
    _budget.get().step(len(parts))
    _budget.get().make(sum(map(_size, parts)) + len(between) * len(parts))


def _metered(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """Make a filter pay before it works, and for a list that it makes."""
    passes = getattr(work, "jinja_pass_arg", None) is not None

    @functools.wraps(work)
    def paid(*arguments: Any, **named: Any) -> Any:
        given = arguments[1:] if passes else arguments
        budget = _budget.get()
        if given:
            budget.step(0 if isinstance(given[0], str) else _size(given[0]))
            _pay_call(name, given[0], (*given[1:], *named.values()))
        made = work(*arguments, **named)
        if isinstance(made, list | str):
            budget.step(len(made) if isinstance(made, list) else len(made) // 64)
        return made

    return paid


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates pay for what they do; use it inside `budgeted`."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters = {name: _metered(name, work) for name, work in self.filters.items()}

    def add_filter(self, name: str, work: Callable[..., Any]) -> None:
        self.filters[name] = _metered(name, work)

    def metered(self, walked: Any) -> Iterator[Any]:
        """Walk over `walked`, paying for every turn."""
        step = _budget.get().step
        for one in walked:
            step()
            yield one

    def joined(self, *parts: Any) -> str:
        """Do what `~` does."""
        texts = [part if isinstance(part, str) else str(part) for part in parts]
        _budget.get().make(sum(map(len, texts)))
        return "".join(texts)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Make `text.format` pay, which the sandbox replaces by its own."""
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None
        text: str = value.__self__

        @functools.wraps(formatted)
        def paid(*arguments: Any, **named: Any) -> str:
            _pay_call("format", text, (*arguments, *named.values()))
            return formatted(*arguments, **named)

        return paid

    def getattr(self, obj: Any, attribute: str) -> Any:
        _budget.get().step(LOOK_STEPS)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: str | Any) -> Any:
        _budget.get().step(LOOK_STEPS)
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _pay_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *arguments: Any, **named: Any) -> Any:
        if isinstance(obj, LoopContext):  # a recursive loop walks over what it is given, unmetered
            _budget.get().step(sum(map(_size, arguments)))
        subject = getattr(obj, "__self__", None)
        if not isinstance(subject, BoundedEnvironment):
            _pay_call(getattr(obj, "__name__", ""), subject, (*arguments, *named.values()))
        return super().call(context, obj, *arguments, **named)

    def _generate(self, source: nodes.Template, *rest: Any, **named: Any) -> str:
        self._meter(source)
        return super()._generate(source, *rest, **named)

    def _meter(self, root: nodes.Node) -> None:
        """Put a meter around what loops walk over, and make `~` pay. Macros pay when they are called."""
        for loop in [*root.find_all(nodes.For)]:
            meter = nodes.EnvironmentAttribute("metered")
            loop.iter = nodes.Call(meter, [loop.iter], [], None, None, lineno=loop.lineno)
        self._replace(root)

    def _replace(self, node: nodes.Node) -> None:
        for name, value in node.iter_fields():
            if isinstance(value, nodes.Node):
                setattr(node, name, self._swapped(value))
            elif isinstance(value, list):
                value[:] = [
                    self._swapped(one) if isinstance(one, nodes.Node) else one for one in value
                ]

    def _swapped(self, node: nodes.Node) -> nodes.Node:
        self._replace(node)
        if not isinstance(node, nodes.Concat):
            return node
        joined = nodes.EnvironmentAttribute("joined")
        return nodes.Call(joined, node.nodes, [], None, None, lineno=node.lineno)
