"""The nodes file: `--fleet @nodes.toml`. Reads it and says in words what is wrong with it; who is in it is `directory.py`'s.

    nodes = [
      "box-a=10.0.0.1:8454",
      "10.0.0.2",
      { name = "box-c", host = "2001:db8::7", port = 8455 },
    ]

Read again on SIGHUP: a file that has become wrong by then is refused as a whole, and the fleet stays as it is.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from superfluid_core.errors import ConfigError
from superfluid_core.limits import MIB

FILE_BYTES_MAX = 1 * MIB
KEYS = frozenset(("name", "host", "port"))


def read_nodes(path: Path) -> list[str]:
    """Return the addresses in the file, each as `--fleet` would take it. Raises ConfigError."""
    try:
        with path.open("rb") as opened:
            data = opened.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"--fleet @{path}: {error.strerror}") from None
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"--fleet @{path}: larger than {FILE_BYTES_MAX} bytes")
    try:
        content = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--fleet @{path}: {error}") from None
    nodes = content.pop("nodes", None)
    if content or not isinstance(nodes, list):
        raise ConfigError(f"--fleet @{path}: expected one list called 'nodes' and nothing else")
    return [_address(path, item) for item in nodes]


def _address(path: Path, item: Any) -> str:
    if isinstance(item, str) and "," not in item and not item.strip().startswith("@"):
        return item
    if not isinstance(item, dict) or set(item) - KEYS or not isinstance(item.get("host"), str):
        raise ConfigError(
            f"--fleet @{path}: {str(item)[:80]} is neither '[NAME=]HOST[:PORT]' nor a table of name, host, port"
        )
    name, host, port = item.get("name", ""), item["host"], item.get("port")
    if not isinstance(name, str) or not (port is None or type(port) is int):
        raise ConfigError(
            f"--fleet @{path}: in {str(item)[:80]} a name is a text and a port a number"
        )
    if any(mark in host + name for mark in ",=@[]"):
        raise ConfigError(f"--fleet @{path}: {str(item)[:80]} has a sign that no name or host has")
    host = f"[{host}]" if ":" in host else host
    return (f"{name}=" if name else "") + host + ("" if port is None else f":{port}")
