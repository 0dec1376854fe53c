"""The key policy: every member, every refusal, and that no refusal shows a secret."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from superfluid_core.errors import ConfigError
from superfluid_core.session import QosClass
from superfluid_head.access.keys import KeyRing, Principal
from superfluid_head.access.policy import FIELDS, read_policy
from superfluid_head.access.rules import KeySources

SECRET, OTHER = "sk-SECRETSECRET-1", "sk-SECRETSECRET-2"
ENV = {"SUPERFLUID_KEY_A": OTHER, "EMPTY": "", "SHORT": "SECRET"}


def write(folder: Path, value: Any, mode: int = 0o600) -> Path:
    file = folder / "keys.json"
    file.write_text(value if isinstance(value, str) else json.dumps(value))
    file.chmod(mode)
    return file


def policy(folder: Path, *keys: Any) -> Path:
    return write(folder, {"keys": list(keys)})


def test_every_member_arrives_and_has_its_default(tmp_path: Path) -> None:
    full = {
        "name": "team.a-1_x", "key": SECRET, "class": "background", "max_class": "INTERACTIVE", "batch_invariant": True,
        "rate_limit_rpm": 60, "tokens_per_minute": 9_000, "max_concurrent": 4, "weight": 3, "models": ["org/m"], "admin": True,
    }  # fmt: skip
    given, plain = read_policy(policy(tmp_path, full, {"name": "b", "key": OTHER}), {})
    assert given.principal == Principal(
        "team.a-1_x", True, QosClass.BACKGROUND, QosClass.INTERACTIVE, True, frozenset({"org/m"}), 3, 60, 9_000, 4
    )  # fmt: skip
    assert plain.principal == Principal("b", False, QosClass.AGENT, QosClass.AGENT)
    assert set(full) | {"key_env", "key_sha256"} == set(FIELDS)


def test_a_key_may_stand_in_the_environment_or_as_its_digest(tmp_path: Path) -> None:
    digest = hashlib.sha256(SECRET.encode()).hexdigest()
    keys = [{"name": "a", "key_env": "SUPERFLUID_KEY_A"}, {"name": "b", "key_sha256": digest}]
    file = policy(tmp_path, *keys)
    ring = KeySources(policy=file).read(ENV)
    assert [ring.find(s.encode()).name for s in (OTHER, SECRET)] == ["a", "b"]  # type: ignore[union-attr]
    assert ring.find(digest.encode()) is None
    assert KeySources(secret="sk-global-key-1", policy=file).read(ENV).names == {
        "default",
        "a",
        "b",
    }


A = {"name": "a", "key": SECRET}
WRONG: list[tuple[Any, str]] = [
    ("{", "not valid JSON"),
    ('{"keys": [], "keys": []}', "twice"),
    ("[]", "one member"),
    ({}, "one member"),
    ({"keys": [A], SECRET: 1}, "one member"),
    ({"keys": {}}, "at least one"),
    ({"keys": []}, "at least one"),
    ({"keys": [SECRET]}, r"keys\[0\] is no object"),
    ({"keys": [A, {**A, "name": "b"}]}, r"keys\[1\]: another key has this secret"),
    ({"keys": [A, {**A, "key": OTHER}]}, r"keys\[1\]: another key has this name"),
    ({"keys": [{**A, SECRET: 1}]}, "unknown member"),
    ({"keys": [{**A, "name": SECRET}]}, "is the name of a key"),
    ({"keys": [A, {"name": SECRET, "key": OTHER}]}, "is the name of a key"),
    ({"keys": [{"name": "a"}]}, "exactly one of"),
    ({"keys": [{**A, "key_env": "SUPERFLUID_KEY_A"}]}, "exactly one of"),
    ({"keys": [{"name": "a", "key": 12345678}]}, "must be a string"),
    ({"keys": [{"name": "a", "key": "SECRET"}]}, "at least 8"),
    ({"keys": [{"name": "a", "key": "SECRET with blanks"}]}, "space"),
    ({"keys": [{"name": "a", "key_env": "UNSET_SECRET"}]}, "not set"),
    ({"keys": [{"name": "a", "key_env": "EMPTY"}]}, "not set"),
    ({"keys": [{"name": "a", "key_env": "SHORT"}]}, "at least 8"),
    ({"keys": [{"name": "a", "key_env": SECRET}]}, "no name of an environment variable"),
    ({"keys": [{"name": "a", "key_sha256": SECRET}]}, "64 hexadecimal"),
    *(({"keys": [{**A, "name": name}]}, "name must be") for name in (None, "", "a b", 7, "é", "x" * 129, SECRET + "/")),
    *(({"keys": [{**A, "name": name}]}, "name is taken") for name in ("default", "anonymous")),
    *(({"keys": [{**A, "class": word}]}, "class must be one of") for word in (SECRET, 1, None)),
    ({"keys": [{**A, "max_class": SECRET}]}, "max_class must be one of"),
    ({"keys": [{**A, "class": "interactive", "max_class": "background"}]}, "worse than class"),
    *(
        ({"keys": [{**A, field: value}]}, f"{field} must be")
        for field in ("rate_limit_rpm", "tokens_per_minute", "max_concurrent", "weight")
        for value in (-1, 1.5, True, SECRET, None, 10**12)
    ),
    ({"keys": [{**A, "weight": 0}]}, "weight must be"),
    *(({"keys": [{**A, "models": value}]}, "models must be") for value in ([], "m", [SECRET, 1], [""], None)),
    *(({"keys": [{**A, field: SECRET}]}, f"{field} must be") for field in ("admin", "batch_invariant")),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_what_is_wrong_is_a_refusal_that_shows_no_secret(tmp_path: Path, number: int) -> None:
    value, words = WRONG[number]
    with pytest.raises(ConfigError, match=words) as caught:
        read_policy(write(tmp_path, value), ENV)
    assert "SECRET" not in caught.value.message.replace("UNSET_SECRET", "")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_the_global_key_is_nobody_elses(tmp_path: Path) -> None:
    for keys in ([A], [{"name": SECRET, "key": OTHER}]):
        with pytest.raises(ConfigError, match="global key") as caught:
            KeySources(secret=SECRET, policy=policy(tmp_path, *keys)).read({})
        assert "SECRET" not in caught.value.message
    assert "SECRET" not in repr(KeySources(secret=SECRET))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="readable by everyone"):
        read_policy(write(tmp_path, {"keys": [A]}, 0o604), {})
    with pytest.raises(ConfigError, match="not a regular file"):
        read_policy(tmp_path, {})
    with pytest.raises(ConfigError, match="No such file"):
        read_policy(tmp_path / "missing.json", {})


def test_a_ring_takes_other_keys_but_never_none() -> None:
    ring = KeyRing([(SECRET, Principal("a"))])
    ring.adopt(KeyRing([(OTHER, Principal("b"))]))
    assert ring.find(SECRET.encode()) is None
    assert ring.names == {"b"}
    with pytest.raises(AssertionError):
        ring.adopt(KeyRing())


def test_the_example_is_a_policy(tmp_path: Path) -> None:
    example = Path(__file__).resolve().parents[3] / "deploy" / "keys.json"
    env = {"SUPERFLUID_KEY_CHAT_APP": SECRET, "SUPERFLUID_KEY_BATCH": OTHER}
    found = read_policy(write(tmp_path, example.read_text()), env)
    assert [key.principal.name for key in found] == ["ops", "chat-app", "batch"]
