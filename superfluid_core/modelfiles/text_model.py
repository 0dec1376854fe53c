"""The text side of a model: configuration, tokenizer and template, from a few small files by name.

Owns the list of those files and how they are read together. It must not know where they came from:
a directory, a GGUF (which writes the same files) or a node's FILE messages. The invariant: the same
files give the same ids and the same fingerprint, on every host.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from functools import cached_property

from superfluid_core.errors import ModelFilesError
from superfluid_core.modelfiles.config import ModelConfig, config_from_hf
from superfluid_core.modelfiles.fingerprint import text_fingerprint
from superfluid_core.modelfiles.template import ChatTemplate, TemplateSources
from superfluid_core.modelfiles.tokenizer import TextSettings, Tokenizer
from superfluid_core.modelfiles.values import Fields, parse_table

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
TEMPLATE_TABLE = "chat_template.json"
TEXT_FILES = (
    CONFIG,
    GENERATION_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TEMPLATE,
    TEMPLATE_TABLE,
)
TEXT_BYTES_MAX = 64 << 20


class TextModel:
    """What a head needs of a model. Tokenizer and template are built when first asked for."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        if unknown := [name for name in files if name not in TEXT_FILES]:
            raise ModelFilesError(f"{unknown[0][:60]!r} is not among the text files of a model")
        if sum(map(len, files.values())) > TEXT_BYTES_MAX:
            raise ModelFilesError(f"the text files exceed {TEXT_BYTES_MAX >> 20} MiB")
        self.files: dict[str, bytes] = {name: files[name] for name in TEXT_FILES if name in files}

    @cached_property
    def config(self) -> ModelConfig:
        """The shape; its BOS and ends are those of the tokenizer, so that all sides agree."""
        if TOKENIZER not in self.files:
            return self._declared
        tokenizer = self.tokenizer()
        return dataclasses.replace(
            self._declared, bos_id=tokenizer.bos_id, eos_ids=tokenizer.eos_ids
        )

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def template(self) -> ChatTemplate | None:
        """Give the chat template, None for a model that has none."""
        return self._template

    def fingerprint(self) -> str:
        return self._fingerprint

    @cached_property
    def _declared(self) -> ModelConfig:
        return config_from_hf(self._table(CONFIG), self._table(GENERATION_CONFIG))

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        if TOKENIZER not in self.files:
            raise ModelFilesError(f"the model has no {TOKENIZER} (no other form is read)")
        settings = Fields(self._table(TOKENIZER_CONFIG), TOKENIZER_CONFIG)
        return Tokenizer(
            self.files[TOKENIZER],
            TextSettings(
                bos_id=self._declared.bos_id,
                eos_ids=self._declared.eos_ids,
                bos_text=_token_text(settings, "bos_token"),
                eos_text=_token_text(settings, "eos_token"),
                adds_bos=settings.truth("add_bos_token", False)
                if settings.has("add_bos_token")
                else None,
            ),
        )

    @cached_property
    def _template(self) -> ChatTemplate | None:
        sources = self._sources()
        if sources is None:
            return None
        tokenizer = self._tokenizer
        settings = Fields(self._table(TOKENIZER_CONFIG), TOKENIZER_CONFIG)
        bos = _token_text(settings, "bos_token") or _text_of(tokenizer, tokenizer.bos_id)
        first_end = tokenizer.eos_ids[0] if tokenizer.eos_ids else None
        eos = _token_text(settings, "eos_token") or _text_of(tokenizer, first_end)
        return ChatTemplate(sources, bos=bos, eos=eos, specials=tokenizer.special_texts)

    @cached_property
    def _fingerprint(self) -> str:
        parts = {
            name: data
            for name, data in self.files.items()
            if name in (TOKENIZER, TEMPLATE, TEMPLATE_TABLE)
        }
        settings = self._table(TOKENIZER_CONFIG)
        telling = ("bos_token", "eos_token", "add_bos_token", "chat_template")
        told = {key: settings[key] for key in telling if settings.get(key) is not None}
        ends = [self._declared.bos_id, list(self._declared.eos_ids)]
        parts["settings"] = json.dumps([told, ends], sort_keys=True).encode()
        return text_fingerprint(parts)

    def _table(self, name: str) -> dict[str, object]:
        return parse_table(self.files[name], name) if name in self.files else {}

    def _sources(self) -> TemplateSources | None:
        """Find the template: a file of its own wins over the tokenizer's settings."""
        if TEMPLATE in self.files:
            return TemplateSources(self.files[TEMPLATE].decode("utf-8", "replace"))
        for name in (TEMPLATE_TABLE, TOKENIZER_CONFIG):
            value = self._table(name).get("chat_template")
            if isinstance(value, str):
                return TemplateSources(value)
            if isinstance(value, list) and (named := _named(value)):
                return named
        return None


def from_text_files(files: Mapping[str, bytes]) -> TextModel:
    """Build the text side of a model from files that a node sent."""
    return TextModel(files)


def _named(templates: list[object]) -> TemplateSources | None:
    """Choose from a list of named templates: the default one, and the one for tools."""
    by_name: dict[str, str] = {}
    for entry in templates:
        if isinstance(entry, dict):
            name, source = entry.get("name"), entry.get("template")
            if isinstance(name, str) and isinstance(source, str):
                by_name[name] = source
    if not by_name:
        return None
    plain = by_name.get("default", next(iter(by_name.values())))
    return TemplateSources(plain, by_name.get("tool_use"))


def _token_text(settings: Fields, key: str) -> str | None:
    """Read a token that is written as a text or as an object with its content."""
    if not settings.has(key):
        return None
    if settings.is_text(key):
        return settings.text(key)
    return Fields(settings.mapping(key), key).text("content")


def _text_of(tokenizer: Tokenizer, token: int | None) -> str:
    return "" if token is None else tokenizer.token_bytes(token).decode("utf-8", "replace")
