"""`superfluid-noded --check`: what this host would do with these settings, a line each, before any weight is loaded.

Every line is tried, also after one that failed, so that a new host is mended in one round. The first failure decides the exit
status: 1 an address that is taken, 2 the configuration or a key, 3 the model or the GPU. It listens on nothing: addresses
are bound and let go. What cannot even be parsed has failed before this is asked.
"""

from __future__ import annotations

import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from superfluid_core.errors import EngineError, SuperfluidError
from superfluid_core.limits import MIB
from superfluid_core.link.addresses import format_address
from superfluid_core.link.tls import Credentials, PkiFiles
from superfluid_noded.build import Model, check_engine, describe_device
from superfluid_noded.config import NodeConfig
from superfluid_noded.server import LoadError

GIB = 1024 * MIB
NAME_WIDTH = 8

Row = tuple[str, Callable[[], str]]


def report(
    config: NodeConfig,
    models: tuple[Model, ...],
    keys: Credentials | None,
    say: Callable[[str], None],
) -> None:
    """Say every line. Raises the first SuperfluidError that was met, after the last line."""
    failure: SuperfluidError | None = None
    for name, find in _rows(config, models, keys):
        try:
            words = find()
        except SuperfluidError as error:
            words = f"FAILED: {error.message}"
            failure = failure or error
        say(f"{name:<{NAME_WIDTH}} {words}")
    if failure is not None:
        raise failure
    say("ok")


def _rows(config: NodeConfig, models: tuple[Model, ...], keys: Credentials | None) -> Iterator[Row]:
    for model in models:
        yield "model", lambda model=model: _model(model)  # type: ignore[misc]
        yield "window", lambda model=model: f"{model.window} tokens, {model.lanes} lanes"  # type: ignore[misc]
        yield "weights", lambda model=model: _weights(model)  # type: ignore[misc]
    yield "engine", lambda: check_engine(config, models[0])
    yield "device", lambda: _device(config)
    yield "key", lambda: _key(config, keys)
    guard = "no key" if keys is None else f"key {keys.key_id}"
    if not config.listen:
        yield "listen", lambda: f"off as {config.identity} ({guard})"
    for place in config.listen:
        yield "listen", lambda place=place: f"{_bindable(place)} as {config.identity} ({guard})"  # type: ignore[misc]
    for place in config.join:
        yield "join", lambda place=place: format_address(*place)  # type: ignore[misc]
    metrics = config.metrics
    yield "metrics", lambda: "off" if metrics is None else _bindable(metrics)


def _model(model: Model) -> str:
    return f"{', '.join(model.names)} ({model.files.kind}, {model.files.config.family})"


def _weights(model: Model) -> str:
    """Read parts of every file of weights. Raises ModelFilesError."""
    path = model.files.path
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    fingerprint = model.files.weights_fingerprint()
    size = sum(each.stat().st_size for each in files)
    counted = "1 file" if len(files) == 1 else f"{len(files)} files"
    shown = f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"
    return f"{counted}, {shown}, readable, fingerprint {fingerprint}"


def _device(config: NodeConfig) -> str:
    try:
        return describe_device(config)
    except EngineError as error:
        raise LoadError(error.message, code=error.code) from error


def _key(config: NodeConfig, keys: Credentials | None) -> str:
    """Say where the key is; that it is nobody else's was judged when it was read."""
    path = Path(keys.key) if isinstance(keys, PkiFiles) else config.auth_file
    if keys is None or path is None:
        return "none: links are neither encrypted nor authenticated"
    mode = stat.S_IMODE(path.stat().st_mode)
    return f"{keys.key_id} from {path} (mode {mode:04o})"


def _bindable(place: tuple[str, int]) -> str:
    """Bind an address and let it go again. Raises SuperfluidError."""
    where = format_address(*place)
    try:
        found = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)
        for family, kind, _, _, address in found:
            with socket.socket(family, kind) as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind(address)
    except OSError as error:
        raise SuperfluidError(f"cannot listen on {where}: {error.strerror}") from None
    return where
