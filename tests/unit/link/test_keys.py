"""Key files are read by the rules, written once, and never shown."""

from __future__ import annotations

import base64
import os
import stat
import traceback
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from superfluid_core.errors import ConfigError
from superfluid_core.link.keys import derive, keys_from_secrets, load_keys, write_key_file

KEY = bytes(range(32))
LINE = "fk1:" + base64.urlsafe_b64encode(KEY).decode().rstrip("=")
OTHER = "fk1:" + base64.urlsafe_b64encode(bytes(range(1, 33))).decode()


def written(path: Path, data: bytes | str, mode: int = 0o600) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    path.chmod(mode)
    return path


def test_a_written_key_can_be_loaded_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "fleet.key"
    made = write_key_file(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text().startswith("fk1:")
    loaded = load_keys(path)
    assert loaded.key_id == made.key_id
    assert loaded.prefix_salt == made.prefix_salt
    assert len(made.key_id) == 8


def test_a_key_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "fleet.key"
    write_key_file(path)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="exists already"):
        write_key_file(path)
    assert path.read_bytes() == before
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError):
        write_key_file(tmp_path / "link")
    with pytest.raises(ConfigError, match="cannot write"):
        write_key_file(tmp_path / "no" / "such" / "directory")


def test_what_is_derived_is_the_same_on_every_machine() -> None:
    keys = keys_from_secrets((KEY,))
    assert keys.key_id == "00a6d181"
    again = keys_from_secrets((KEY,))
    certificates = [
        one.authorities[0].certificate.public_bytes(Encoding.DER) for one in (keys, again)
    ]
    assert certificates[0] == certificates[1]
    labels = ("key id", "prefix cache salt", "log hash key", "authority seed", "authority name")
    assert len({derive(KEY, label, 32) for label in labels}) == len(labels)


@pytest.mark.parametrize(
    "text",
    [
        LINE,
        LINE + "\n",
        LINE + "\r\n",
        LINE + "=\n",
        "\ufeff" + LINE + "\r\n\r\n",
        f"# the fleet's key\n\n  {LINE}  \n",
    ],
)
def test_line_ends_marks_and_comments_do_not_matter(tmp_path: Path, text: str) -> None:
    path = written(tmp_path / "key", text)
    assert load_keys(path).key_id == keys_from_secrets((KEY,)).key_id


def test_the_first_of_two_keys_signs_and_both_are_trusted(tmp_path: Path) -> None:
    keys = load_keys(written(tmp_path / "key", f"{LINE}\n{OTHER}\n"))
    assert len(keys.authorities) == len(keys.key_ids) == 2
    assert keys.key_id == keys_from_secrets((KEY,)).key_id
    assert keys.prefix_salt == keys_from_secrets((KEY,)).prefix_salt


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "holds no key"),
        ("\n\n# only words\n", "holds no key"),
        ("fk1:" + base64.urlsafe_b64encode(bytes(31)).decode(), "31 bytes"),
        ("fk1:", "0 bytes"),
        ("fk2:" + LINE[4:], "does not begin with fk1:"),
        (LINE[4:], "does not begin with fk1:"),
        (LINE + "!", "not base64url"),
        (LINE + "AA", "not base64url"),
        (f"{LINE}\n{LINE}\n", "twice"),
        (
            "\n".join(
                f"fk1:{base64.urlsafe_b64encode(bytes([n]) * 32).decode()}" for n in range(9)
            ),
            "more than 8",
        ),
        (b"\xff\xfe\x00", "not text"),
        (bytes(1024 * 1024), "larger than"),
    ],
)
def test_other_content_is_refused_in_words(
    tmp_path: Path, content: bytes | str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_keys(written(tmp_path / "key", content))


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o666])
def test_a_file_that_is_open_to_everybody_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match="open to everybody"):
        load_keys(written(tmp_path / "key", LINE, mode))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "key", LINE)
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match="another user"):
        load_keys(path)


def test_links_are_followed_and_what_is_no_file_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "key", LINE)
    (tmp_path / "link").symlink_to(path)
    assert load_keys(tmp_path / "link").key_id == load_keys(path).key_id
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name, words in (
        ("loop", "loop of links"),
        ("fifo", "not a regular file"),
        (".", "not a regular file|directory"),
        ("missing", "No such file"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_keys(tmp_path / name)


def test_the_key_shows_nowhere(tmp_path: Path) -> None:
    keys = load_keys(written(tmp_path / "key", f"{LINE}\n{OTHER}\n"))
    shown = repr(keys) + str(keys) + repr(keys.authorities)
    bad = written(tmp_path / "bad", LINE + "!")
    try:
        load_keys(bad)
    except ConfigError as error:
        shown += repr(error) + "".join(traceback.format_exception(error))
    for secret in (LINE[4:], LINE[4:20], KEY.hex(), repr(KEY)[2:-1], keys.prefix_salt.hex()):
        assert secret not in shown
    assert repr(keys.prefix_salt) not in shown
    assert keys.key_id in shown
