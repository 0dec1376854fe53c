"""One table of options per program: it makes the flags, the environment names, the TOML names and `config check`.

Precedence: flag > SUPERFLUID_* > TOML > default (decisions 31). A flag has one name; its environment variable is
`SUPERFLUID_` + the name in capitals, its TOML key the name with dashes. Nothing here reads the environment or a file:
`config.py` of each program passes both in.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import click

from superfluid_core.errors import ConfigError

Parse = Callable[[str], Any]
EPILOG = (
    "Every --some-name can also be given as SUPERFLUID_SOME_NAME in the environment or as some-name in a TOML file (--config). "
    "The order is: flag, environment, file, default."
)


@dataclass(frozen=True, slots=True)
class Option:
    """One setting. `kind` parses one textual value and raises ValueError with words for a person.

    `repeated` options hold a tuple; in the environment their values are separated by commas. `is_flag` options are booleans.
    `secret` options never show their value in `config check` and exist neither as flag nor in argv: environment or file only.
    """

    name: str
    help: str
    kind: Parse = str
    default: Any = None
    metavar: str = ""
    repeated: bool = False
    is_flag: bool = False
    secret: bool = False

    @property
    def attribute(self) -> str:
        return self.name.replace("-", "_")

    @property
    def env(self) -> str:
        return "SUPERFLUID_" + self.attribute.upper()


class Setting(NamedTuple):
    """A merged value and where it came from: flag, env, toml or default."""

    value: Any
    source: str


_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


def parse_bool(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError(f"not a yes or no: {text[:40]!r}")


def integer(low: int, high: int) -> Parse:
    """Parse an int in low..high."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"not a whole number: {text[:40]!r}") from None
        if not low <= value <= high:
            raise ValueError(f"{value} is outside {low}..{high}")
        return value

    return parse


def choice(*names: str) -> Parse:
    """Parse one of `names`."""

    def parse(text: str) -> str:
        if text not in names:
            raise ValueError(f"{text[:40]!r} is none of {', '.join(names)}")
        return text

    return parse


def _parse(option: Option, raw: Any, where: str) -> Any:
    """Turn what a source gave into the option's value. Raises ConfigError naming the source."""
    try:
        if option.is_flag:
            return raw if isinstance(raw, bool) else parse_bool(str(raw))
        if option.repeated:
            items = raw if isinstance(raw, list | tuple) else str(raw).split(",")
            return tuple(option.kind(str(item)) for item in items)
        if isinstance(raw, dict | list | bool):
            raise ValueError("expected a plain value")  # noqa: TRY004 - becomes ConfigError
        return option.kind(str(raw))
    except ValueError as error:
        shown = "value refused" if option.secret else str(error)
        raise ConfigError(f"{where}: {option.name}: {shown}") from None


def merge(
    options: Sequence[Option],
    flags: Mapping[str, Any],
    env: Mapping[str, str],
    toml: Mapping[str, Any],
) -> dict[str, Setting]:
    """Merge the four sources into one Setting per option, keyed by attribute name.

    Raises ConfigError for a value that does not parse and for a TOML key that no option has.
    """
    known = {option.name for option in options}
    unknown = sorted(set(toml) - known)
    if unknown:
        raise ConfigError(f"configuration file: unknown name(s): {_with_hints(unknown, known)}")
    merged: dict[str, Setting] = {}
    for option in options:
        given = flags.get(option.attribute)
        if given is not None and given != () and not (option.is_flag and given is False):
            merged[option.attribute] = Setting(_parse(option, given, "flag"), "flag")
        elif option.env in env:
            merged[option.attribute] = Setting(_parse(option, env[option.env], option.env), "env")
        elif option.name in toml:
            merged[option.attribute] = Setting(
                _parse(option, toml[option.name], "configuration file"), "toml"
            )
        else:
            default = option.default
            if default is None and option.repeated:
                default = ()
            if default is None and option.is_flag:
                default = False
            merged[option.attribute] = Setting(default, "default")
    return merged


def _with_hints(unknown: Sequence[str], known: Iterable[str]) -> str:
    """List names that no option has, each with the one that was meant, if one is near."""
    names = sorted(known)
    near = {name: difflib.get_close_matches(name, names, n=1, cutoff=0.7) for name in unknown}
    return ", ".join(
        name + (f" (meant: {near[name][0]}?)" if near[name] else "") for name in unknown
    )


def source_of(option: Option, setting: Setting) -> str:
    """Say where a value came from: of an environment variable also its name."""
    return f"env {option.env}" if setting.source == "env" else setting.source


def add_flags(options: Sequence[Option]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a click command with a flag for every option that is not secret."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            if option.secret:
                continue
            shown = option.help
            if option.default not in (None, (), False):
                shown += f"  [default: {option.default}]"
            function = click.option(
                f"--{option.name}",
                option.attribute,
                help=shown,
                metavar=None if option.is_flag else (option.metavar or None),
                multiple=option.repeated,
                is_flag=option.is_flag,
                default=None,
                type=None if option.is_flag else str,
            )(function)
        return function

    return decorate
