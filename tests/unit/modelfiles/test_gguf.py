"""The GGUF reader: what it reads, and that hostile files end in ModelFilesError."""

from __future__ import annotations

import contextlib
import random
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest

from superfluid_core.errors import ModelFilesError
from superfluid_core.modelfiles.gguf import BLOCKS, GgmlType, GgufFile
from superfluid_core.modelfiles.resolve import resolve
from tests.unit.modelfiles.llama_cpp import write_tiny_llama
from tests.unit.modelfiles.vocabularies import cut_down


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def key(name: str, kind: int, payload: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + payload


def array(kind: int, count: int, payload: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + payload


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


def file_of(
    keys: list[bytes], tensors: list[bytes], data: bytes = b"", *, version: int = 3
) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys))
    head += b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


SOUND = file_of(
    [
        key("general.architecture", 8, text("llama")),
        key("a.flag", 7, b"\1"),
        key("a.small", 1, b"\xff"),
        key("a.real", 12, struct.pack("<d", 0.5)),
        key("a.numbers", 9, array(5, 3, struct.pack("<3i", 1, -2, 3))),
        key("a.texts", 9, array(8, 2, text("x") + text("▁y"))),
        key("a.nested", 9, array(9, 1, array(0, 2, b"\1\2"))),
    ],
    [tensor("w", (4, 2), 0, 0), tensor("q", (32, 1), 8, 32)],
    bytes(range(32)) + bytes(34),
)


def opened(data: bytes, path: Path) -> GgufFile:
    file = path / "f.gguf"
    file.write_bytes(data)
    return GgufFile.open(file)


def test_values_of_every_kind_are_read(tmp_path: Path) -> None:
    file = opened(SOUND, tmp_path)
    assert file.metadata == {
        "general.architecture": "llama",
        "a.flag": True,
        "a.small": -1,
        "a.real": 0.5,
        "a.numbers": [1, -2, 3],
        "a.texts": ["x", "▁y"],
        "a.nested": [[1, 2]],
    }
    weights = file.tensors["w"]
    assert (weights.shape, weights.type, weights.bytes) == ((2, 4), GgmlType.F32, 32)
    assert bytes(file.data(weights)) == bytes(range(32))
    assert file.tensors["q"].bytes == 34
    file.close()


def test_a_view_outlives_close(tmp_path: Path) -> None:
    file = opened(SOUND, tmp_path)
    view = file.data(file.tensors["w"])
    file.close()
    assert view[1] == 1


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    for length in range(0, len(SOUND), 3):
        with pytest.raises(ModelFilesError):
            opened(SOUND[:length], tmp_path)


@pytest.mark.slow
def test_a_file_with_any_byte_changed_is_read_or_refused(tmp_path: Path) -> None:
    draw = random.Random(5)
    for _ in range(600):
        data = bytearray(SOUND)
        for _ in range(draw.randint(1, 3)):
            data[draw.randrange(len(data))] = draw.choice((0, 1, 0x7F, 0x80, 0xFF))
        with contextlib.suppress(ModelFilesError):
            opened(bytes(data), tmp_path).close()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GGML" + bytes(40), "not a GGUF"),
        (file_of([], [], version=1), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(32), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "metadata keys"),
        (file_of([key("k", 8, struct.pack("<Q", 1 << 62))], []), "more than"),
        (file_of([key("k", 9, array(0, 1 << 61, b""))], []), "array entries"),
        (file_of([key("k", 9, array(8, 1000, b""))], []), "array entries"),
        (file_of([key("k", 9, array(9, 1, array(9, 1, array(9, 1, b"")))), b""], []), "nested"),
        (file_of([key("k", 77, b"")], []), "unknown type 77"),
        (file_of([key("k", 7, b"\0"), key("k", 7, b"\0")], []), "twice"),
        (file_of([], [tensor("w", (2,), 0, 0)] * 2, bytes(32)), "twice"),
        (file_of([], [tensor("w", (1,) * 5, 0, 0)], bytes(32)), "5 dimensions"),
        (file_of([], [tensor("w", (2,), 5, 0)], bytes(32)), "element type 5"),
        (file_of([], [tensor("w", (2,), 0, 8)], bytes(32)), "not aligned"),
        (file_of([], [tensor("w", (1 << 62, 1 << 62), 0, 0)], bytes(32)), "past the file"),
        (file_of([], [tensor("w", (33,), 8, 0)], bytes(64)), "do not fill"),
        (file_of([key("general.alignment", 4, struct.pack("<I", 33))], []), "alignment"),
        (file_of([key("general.alignment", 8, text("x"))], []), "alignment"),
    ],
)
def test_hostile_files_are_refused_in_words(data: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=words):
        opened(data, tmp_path)


def test_a_missing_or_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="cannot read"):
        GgufFile.open(tmp_path / "none.gguf")
    with pytest.raises(ModelFilesError, match="empty"):
        opened(b"", tmp_path)


def test_strings_that_are_not_utf8_do_not_break_the_reader(tmp_path: Path) -> None:
    broken = struct.pack("<Q", 2) + b"\xff\xfe"
    file = opened(file_of([key("k", 8, broken), key("l", 9, array(8, 1, broken))], []), tmp_path)
    assert file.metadata["l"] == [file.metadata["k"]]


@pytest.mark.reference
def test_block_sizes_are_those_of_the_format() -> None:
    for kind, sizes in BLOCKS.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(int(kind))] == sizes, kind


@pytest.mark.reference
@pytest.mark.slow
def test_a_file_is_read_as_the_gguf_package_reads_it(
    demo_metadata: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "t.gguf"
    fields = cut_down(demo_metadata, 2000)
    write_tiny_llama(path, fields.pop("tokens"), {"model": "gpt2", "pre": "smollm", **fields})
    theirs, ours = gguf.GGUFReader(str(path)), GgufFile.open(path)
    assert set(ours.metadata) == {name for name in theirs.fields if not name.startswith("GGUF.")}
    for name, value in ours.metadata.items():
        assert value == theirs.fields[name].contents(), name
    assert list(ours.tensors) == [entry.name for entry in theirs.tensors]
    for entry in theirs.tensors:
        found = ours.tensors[entry.name]
        assert found.shape == tuple(int(size) for size in reversed(entry.shape))
        assert (int(found.type), found.offset) == (int(entry.tensor_type), entry.data_offset)
        assert bytes(ours.data(found)) == entry.data.tobytes()
    ours.close()


def test_a_hostile_vocabulary_is_refused_or_read(tmp_path: Path) -> None:
    """Tokens twice, merges of unknown parts, ids out of range: never another exception."""
    base = {
        "general.architecture": (8, text("llama")),
        "llama.context_length": (4, struct.pack("<I", 64)),
        "llama.embedding_length": (4, struct.pack("<I", 32)),
        "llama.block_count": (4, struct.pack("<I", 1)),
        "llama.feed_forward_length": (4, struct.pack("<I", 32)),
        "llama.attention.head_count": (4, struct.pack("<I", 2)),
        "llama.attention.layer_norm_rms_epsilon": (6, struct.pack("<f", 1e-5)),
        "tokenizer.ggml.model": (8, text("gpt2")),
        "tokenizer.ggml.tokens": (
            9,
            array(8, 5, text("a") * 2 + text("") + text("b") + text("ab")),
        ),
        "tokenizer.ggml.merges": (
            9,
            array(8, 5, text("a b") + text("x y") + text("") + text(" ") + text("a b c")),
        ),
        "tokenizer.ggml.eos_token_id": (4, struct.pack("<I", 1 << 30)),
        "tokenizer.ggml.bos_token_id": (4, struct.pack("<I", 3)),
    }
    path = tmp_path / "v.gguf"
    path.write_bytes(file_of([key(name, *value) for name, value in base.items()], []))
    ours = resolve(str(path)).tokenizer()
    assert ours.encode("ab", allow_special=True) == [4]
    assert (ours.token_bytes(1), ours.token_bytes(2), ours.eos_ids) == (b"", b"", ())
    for name in base:
        lesser = {other: value for other, value in base.items() if other != name}
        path.write_bytes(file_of([key(other, *value) for other, value in lesser.items()], []))
        with contextlib.suppress(ModelFilesError):
            resolve(str(path)).tokenizer()
