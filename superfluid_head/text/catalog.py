"""The tokenizers and templates that a head has: given at start, or fetched from the nodes that serve the model.

Owns a list that only grows. A head that was given no MODEL asks a node for the model's small text files, and uses them
only if their fingerprint is the one that the node offered. Names are of no importance here but for messages.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from superfluid_core.errors import SuperfluidError
from superfluid_core.logs import log
from superfluid_core.modelfiles.resolve import resolve
from superfluid_core.modelfiles.text_model import TEXT_FILES, TextModel, from_text_files
from superfluid_head.text.chat import ModelText, TextWorkers
from superfluid_head.text.dialects.detect import DialectChoice

LOOK_MS = 200
RETRY_MS = 5_000
MODELS_MAX = 64

_logger = logging.getLogger(__name__)


class Offered(Protocol):
    """A model that nodes offer."""

    @property
    def name(self) -> str: ...

    @property
    def is_up(self) -> bool: ...

    @property
    def text(self) -> str: ...


class Source(Protocol):
    """Where text files are fetched: the fleet."""

    def models(self) -> Sequence[Offered]: ...

    async def fetch_file(self, model: str, name: str) -> bytes | None: ...


class TextCatalog(Sequence[ModelText]):
    """A growing list of models' texts; entries never change."""

    def __init__(self, workers: TextWorkers, dialects: DialectChoice | None = None) -> None:
        self._workers = workers
        self._dialects = dialects or DialectChoice()
        self._texts: list[ModelText] = []

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> ModelText:  # type: ignore[override]  # nobody slices it
        return self._texts[index]

    def __iter__(self) -> Iterator[ModelText]:
        return iter(self._texts)

    def load(self, spec: str, name: str | None, *, offline: bool, token: str | None) -> None:
        """Add the model that a person named, blocking. Raises ModelFilesError."""
        files = resolve(spec, offline=offline, token=token)
        text = _build(files.text_files())
        self.add(name or files.name, text)

    def add(self, name: str, text: TextModel) -> None:
        """Add a model's text, read in the dialect that was chosen, or that its template tells."""
        made = ModelText(name, text, self._workers, self._dialects)
        self._texts.append(made)
        calls, reasoning = made.dialect.calls or "none", made.dialect.reasoning or "none"
        log(_logger, "info", "dialect", model=name, tool_calls=calls, reasoning=reasoning)

    async def follow(self, source: Source) -> None:
        """Fetch what the head lacks, until cancelled. A model that fails is asked for again, later."""
        while True:
            pause_ms = LOOK_MS
            for offered in self._missing(source):
                try:
                    await self._fetch(source, offered)
                except SuperfluidError as error:
                    pause_ms = RETRY_MS
                    words = "cannot fetch the text files of a model"
                    log(_logger, "warning", words, model=offered.name, cause=error.message)
            await asyncio.sleep(pause_ms / 1000)

    def _missing(self, source: Source) -> list[Offered]:
        if len(self._texts) >= MODELS_MAX:
            return []
        known = {text.fingerprint for text in self._texts}
        return [
            offered
            for offered in source.models()
            if offered.is_up and offered.text and offered.text not in known
        ]

    async def _fetch(self, source: Source, offered: Offered) -> None:
        files: dict[str, bytes] = {}
        for name in TEXT_FILES:
            data = await source.fetch_file(offered.name, name)
            if data is not None:
                files[name] = data
        text = await asyncio.to_thread(_build, files)
        if text.fingerprint() != offered.text:
            raise SuperfluidError("the files are not those that the node offered")
        self.add(offered.name, text)
        log(_logger, "info", "fetched tokenizer and template", model=offered.name)


def _build(files: Mapping[str, bytes]) -> TextModel:
    """Build a model's text, blocking; what every prompt will hold of its template's own words is encoded here."""
    text = from_text_files(files)
    template = text.template()
    if template is not None:
        text.tokenizer().keep(template.own_pieces(text.tokenizer()))
    return text
