"""Where tensors lie in safetensors files, and that hostile ones are refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from superfluid_core.errors import ModelFilesError
from superfluid_core.modelfiles.safetensors import SafetensorsIndex


def write(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    path.write_bytes(struct.pack("<Q", size) + text + data)
    return path


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_a_single_file_is_read_as_its_library_wrote_it(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.ones(4, dtype=np.int8),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    index = SafetensorsIndex.open(tmp_path)
    assert sorted(index.names()) == ["a", "b"]
    found = index.locate("a")
    assert (found.dtype, found.shape) == ("F32", (2, 3))
    data = found.path.read_bytes()[found.start : found.end]
    assert data == tensors["a"].tobytes()
    with pytest.raises(ModelFilesError, match="no tensor 'c'"):
        index.locate("c")


def test_shards_are_found_through_the_index(tmp_path: Path) -> None:
    for shard, name in (("m-1.safetensors", "a"), ("m-2.safetensors", "b")):
        save_file({name: np.zeros(3, dtype=np.float16)}, tmp_path / shard)
    weight_map = {"a": "m-1.safetensors", "b": "m-2.safetensors"}
    index_file = tmp_path / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"weight_map": weight_map}))
    index = SafetensorsIndex.open(tmp_path)
    assert index.locate("b").path.name == "m-2.safetensors"
    index_file.write_text(json.dumps({"weight_map": {**weight_map, "c": "m-1.safetensors"}}))
    with pytest.raises(ModelFilesError, match="'c' is not in"):
        SafetensorsIndex.open(tmp_path)


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin", 7, "..\\x.safetensors"]
)
def test_an_index_cannot_lead_out_of_its_directory(shard: Any, tmp_path: Path) -> None:
    index = {"weight_map": {"a": shard}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFilesError):
        SafetensorsIndex.open(tmp_path)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"{", "not valid JSON"),
        ([], "JSON object"),
        ({"a": 1}, "not an object"),
        ({"a": entry("F32", [2], 0, 8)}, "past the file"),
        ({"a": entry("F32", [1], 0, 8)}, "past the file"),
        ({"a": entry("F32", [1], 4, 0)}, "past the file"),
        ({"a": entry("F32", [2], 0, 4)}, "does not fill"),
        ({"a": entry("C64", [1], 0, 4)}, "unknown type"),
        ({"a": entry("F32", [-1], 0, 4)}, "whole numbers"),
        ({"a": {"dtype": "F32"}}, "strange shape"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1, 2]}}, "strange shape"),
    ],
)
def test_hostile_headers_are_refused_in_words(header: Any, words: str, tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", header, bytes(4))
    with pytest.raises(ModelFilesError, match=words):
        SafetensorsIndex.open(tmp_path)


def test_a_header_longer_than_its_file_is_refused(tmp_path: Path) -> None:
    for length in (100, 1 << 62):
        write(tmp_path / "model.safetensors", {}, length=length)
        with pytest.raises(ModelFilesError, match="longer"):
            SafetensorsIndex.open(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    with pytest.raises(ModelFilesError):
        SafetensorsIndex.open(tmp_path)


def test_a_directory_without_safetensors_says_so(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelFilesError, match="no safetensors"):
        SafetensorsIndex.open(tmp_path)
