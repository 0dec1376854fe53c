"""Reads the TOML file of a program's settings: the one place that both programs' `config.py` stand on.

It knows files and bounds, no setting: what the names mean is `options.py`'s.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from superfluid_core.errors import ConfigError

CONFIG_BYTES_MAX = 1 << 20


def read_config_file(file: str | None, default: str) -> Mapping[str, Any]:
    """Return what `file` says; without one, what `default` says if it exists, else nothing. Raises ConfigError."""
    path = Path(file or default)
    if file is None and not path.exists():
        return {}
    try:
        with path.open("rb") as stream:
            data = stream.read(CONFIG_BYTES_MAX + 1)
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise ConfigError(f"configuration file {str(path)!r}: {reason}") from None
    if len(data) > CONFIG_BYTES_MAX:
        raise ConfigError(f"configuration file {str(path)!r}: larger than {CONFIG_BYTES_MAX} bytes")
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"configuration file {str(path)!r}: {error}") from None
