"""The key policy: a JSON file of named keys, each with what its holder may do (access.md, Keys).

Owns the file's form. Everything in it is judged at once, unknown members too, and no message of a refusal holds a value of the
file but names that were found to be well-formed: what stands in the wrong place may be a secret. It must not read the
environment; the variables that `key_env` names are handed in.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from superfluid_core.errors import ConfigError
from superfluid_core.session import QosClass
from superfluid_head.access.keys import (
    ANONYMOUS_NAME,
    GLOBAL_KEY_NAME,
    KEYS_MAX,
    Principal,
    check_key,
    digest_of,
)

POLICY_BYTES_MAX = 4 * 1024 * 1024
NAME_CHARS_MAX = 128
MODELS_MAX = 1_024
MODEL_CHARS_MAX = 256
LIMIT_MAX = 1_000_000_000
WEIGHT_MAX = 1_000
SECRETS = ("key", "key_env", "key_sha256")

_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{NAME_CHARS_MAX}}}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


@dataclass(frozen=True, slots=True)
class PolicyKey:
    """One key of the file."""

    digest: bytes
    principal: Principal


def read_policy(path: Path, env: Mapping[str, str]) -> list[PolicyKey]:
    """Read and judge the file. Raises ConfigError that never shows a secret."""
    where = f"key policy {path}"
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{where}: not a regular file")
        with path.open("rb") as file:
            data = file.read(POLICY_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}") from None
    if status.st_mode & stat.S_IRWXO:
        raise ConfigError(f"{where}: readable by everyone (chmod 640 or less)")
    if len(data) > POLICY_BYTES_MAX:
        raise ConfigError(f"{where}: larger than {POLICY_BYTES_MAX} bytes")
    try:
        return parse_policy(data, env)
    except _PolicyError as error:
        raise ConfigError(f"{where}: {error}") from None


class _PolicyError(Exception):
    """Raised for what is wrong in the file; its words are ours."""


def parse_policy(data: bytes, env: Mapping[str, str]) -> list[PolicyKey]:
    """Judge the content. Raises _PolicyError."""
    try:
        value = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_members)
    except (ValueError, RecursionError):
        raise _PolicyError("is not valid JSON") from None
    if not isinstance(value, dict) or set(value) != {"keys"}:
        raise _PolicyError("must be an object with one member, keys")
    entries = value["keys"]
    if not isinstance(entries, list) or not entries:
        raise _PolicyError("keys must be an array of at least one key")
    if len(entries) > KEYS_MAX:
        raise _PolicyError(f"holds more than {KEYS_MAX} keys")
    found = [_Entry(number, entry, env) for number, entry in enumerate(entries)]
    _judge_together(found)
    return [PolicyKey(entry.digest, entry.principal) for entry in found]


def _members(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise _PolicyError("names a member twice")
    return members


class _Entry:
    """One key while it is judged. Errors say which one it is by its place, and by its name once that is known to be one."""

    def __init__(self, number: int, entry: Any, env: Mapping[str, str]) -> None:
        self.where = f"keys[{number}]"
        if not isinstance(entry, dict):
            raise _PolicyError(f"{self.where} is no object")
        self._members = entry
        if not set(entry) <= KNOWN:
            raise _PolicyError(f"{self.where} has an unknown member; known: {', '.join(FIELDS)}")
        self.name = self._read_name()
        self.digest = self._read_secret(env)
        self.principal = self._read_principal()

    def fail(self, words: str) -> _PolicyError:
        return _PolicyError(f"{self.where}: {words}")

    def _read_name(self) -> str:
        name = self._members.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise self.fail(f"name must be 1..{NAME_CHARS_MAX} of A-Z a-z 0-9 . _ -")
        if name in (GLOBAL_KEY_NAME, ANONYMOUS_NAME):
            raise self.fail("name is taken: it is that of callers without a policy")
        return name

    def _read_secret(self, env: Mapping[str, str]) -> bytes:
        given = [field for field in SECRETS if field in self._members]
        if len(given) != 1:
            raise self.fail(f"exactly one of {', '.join(SECRETS)} is needed")
        value = self._members[given[0]]
        if not isinstance(value, str):
            raise self.fail(f"{given[0]} must be a string")
        match given[0]:
            case "key_sha256":
                if not _DIGEST.fullmatch(value):
                    raise self.fail("key_sha256 must be 64 hexadecimal digits")
                return bytes.fromhex(value)
            case "key_env":
                if not _VARIABLE.fullmatch(value):
                    raise self.fail("key_env is no name of an environment variable")
                if not env.get(value):
                    raise self.fail("the variable that key_env names is not set")
                secret = env[value]
            case _:
                secret = value
        try:
            return digest_of(check_key(secret, given[0]).encode())
        except ConfigError as error:
            raise self.fail(error.message) from None

    def _read_principal(self) -> Principal:
        qos = self._read("class", _class, QosClass.AGENT)
        best = self._read("max_class", _class, qos)
        if best > qos:
            raise self.fail("max_class is worse than class")
        return Principal(
            self.name,
            admin=self._read("admin", _flag, fallback=False),
            qos=qos,
            max_qos=best,
            batch_invariant=self._read("batch_invariant", _flag, fallback=False),
            models=self._read("models", _models, None),
            weight=self._read("weight", _whole(1, WEIGHT_MAX), 1),
            rate_limit_rpm=self._read("rate_limit_rpm", _whole(0, LIMIT_MAX), 0),
            tokens_per_minute=self._read("tokens_per_minute", _whole(0, LIMIT_MAX), 0),
            max_concurrent=self._read("max_concurrent", _whole(0, LIMIT_MAX), 0),
        )

    def _read(self, field: str, parse: Callable[[Any], Any], fallback: Any) -> Any:
        if field not in self._members:
            return fallback
        try:
            return parse(self._members[field])
        except ValueError as error:
            raise self.fail(f"{field} {error}") from None


def _class(value: Any) -> QosClass:
    try:
        if isinstance(value, str):
            return QosClass.parse(value)
    except ValueError:
        pass
    raise ValueError(f"must be one of {', '.join(qos.label for qos in QosClass)}")


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")  # noqa: TRY004 - judged with the others
    return value


def _whole(low: int, high: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return value

    return parse


def _models(value: Any) -> frozenset[str]:
    names = value if isinstance(value, list) else []
    if not 1 <= len(names) <= MODELS_MAX or not all(
        isinstance(name, str) and 1 <= len(name) <= MODEL_CHARS_MAX for name in names
    ):
        raise ValueError(f"must be an array of 1..{MODELS_MAX} names of models")
    return frozenset(names)


FIELDS = (
    *("name", *SECRETS, "class", "max_class", "batch_invariant", "rate_limit_rpm"),
    *("tokens_per_minute", "max_concurrent", "weight", "models", "admin"),
)
KNOWN = frozenset(FIELDS)


def _judge_together(entries: Sequence[_Entry]) -> None:
    names: set[str] = set()
    digests: set[bytes] = set()
    for entry in entries:
        if entry.name in names:
            raise entry.fail("another key has this name")
        if entry.digest in digests:
            raise entry.fail("another key has this secret")
        names.add(entry.name)
        digests.add(entry.digest)
    named = {digest_of(name.encode()) for name in names}
    for entry in entries:
        if entry.digest in named:
            raise entry.fail("a secret is the name of a key")
