"""Models by their hub id, fetched or found in the local cache.

Owns the list of what may be fetched and the words for what can go wrong. It must not know how files
are read. The idea: only data is ever fetched, never code; the hub library brings resume, the token and
the proxies of the environment, and bars on a terminal. Elsewhere a line says that files are fetched and another that they are here.
"""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

from superfluid_core.errors import ModelFilesError
from superfluid_core.logs import log

PATTERNS = ("*.json", "*.jinja", "*.safetensors")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}(?::[\w./-]{1,200}\.gguf)?", re.ASCII)


_logger = logging.getLogger(__name__)


def is_hub_id(spec: str) -> bool:
    """Whether `spec` reads as `owner/name` or `owner/name:file.gguf`."""
    return HUB_ID.fullmatch(spec) is not None and ".." not in spec


def fetch(spec: str, *, offline: bool, token: str | None) -> Path:
    """Bring a model here; gives its directory, or its GGUF file when `spec` names one."""
    # imported here: it costs a good part of a second and most starts do not need it
    import huggingface_hub
    from huggingface_hub import errors
    from huggingface_hub.utils.tqdm import disable_progress_bars

    repository, _, file = spec.partition(":")
    patterns = [file] if file else list(PATTERNS)
    if not sys.stderr.isatty():
        disable_progress_bars()
    if not offline:
        log(_logger, "info", "looking for the model's files at the hub", model=repository)
    try:
        directory = Path(
            huggingface_hub.snapshot_download(
                repository,
                allow_patterns=patterns,
                ignore_patterns=[] if file else ["*/*"],
                local_files_only=offline,
                token=token,
            )
        )
    except errors.GatedRepoError as cause:
        raise ModelFilesError(f"{repository} asks for an accepted licence and a token") from cause
    except errors.RepositoryNotFoundError as cause:
        raise ModelFilesError(f"the hub has no {repository} (or it needs a token)") from cause
    except errors.LocalEntryNotFoundError as cause:
        how = "it is not in the local cache" if offline else "the hub cannot be reached"
        raise ModelFilesError(
            f"cannot get {repository}: {how}; give a directory or a .gguf file instead"
        ) from cause
    except Exception as cause:  # whatever HTTP library the hub library uses has its own tree
        words = str(cause).strip().split("\n")[0][:200] or type(cause).__name__
        raise ModelFilesError(f"cannot get {repository} from the hub: {words}") from cause
    if not offline:
        log(_logger, "info", "the model's files are here", model=repository, folder=str(directory))
    if file:
        return _inside(directory, file, repository)
    return directory


def _inside(directory: Path, file: str, repository: str) -> Path:
    path = directory / file
    if not path.is_file():
        raise ModelFilesError(f"{repository} has no file {file!r}")
    return path
