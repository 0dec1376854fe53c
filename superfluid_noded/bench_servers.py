"""What `superfluid bench scenario` needs of others: llama-server in this process, a model as vLLM and MLX read it.

Owns how both are made from a model's files. What they are asked is not known here. xllamacpp, torch and transformers are imported
only by what needs them.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from superfluid_core.errors import SuperfluidError
from superfluid_core.modelfiles.resolve import ModelFiles, resolve
from superfluid_core.modelfiles.text_model import CONFIG
from superfluid_noded.build import need_modules

PARENT_SECONDS = 1.0


def llama_server(
    files: ModelFiles, *, threads: int, lanes: int, window: int, keeps_prompts: bool
) -> Any:
    """Start llama-server of the xllamacpp wheel (`-np` lanes) on a free port; raises RuntimeError for what it cannot read."""
    import xllamacpp

    if files.kind != "gguf":
        raise RuntimeError("llama-server reads GGUF files only")
    params = xllamacpp.CommonParams()
    params.model.path = str(files.path)
    params.n_ctx = window * lanes
    params.n_parallel = lanes
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.n_gpu_layers = 0
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.cache_prompt = keeps_prompts
    params.warmup = False
    params.n_threads_http = lanes + 4
    return xllamacpp.Server(params)


def plain_folder(files: ModelFiles, folder: Path) -> None:
    """Write a GGUF model into `folder` as a directory of safetensors: bf16 weights, tokenizer and template."""
    from superfluid_noded.bench_peers import plain_weights

    plain_weights(files, str(folder))
    for name, data in files.text_files().items():
        if name != CONFIG:  # the weights brought theirs
            (folder / name).write_bytes(data)


@click.group(help="Servers of others for the benches.")
def main() -> None:
    """Gather them."""


@main.command("llama-server")
@click.option("--model", required=True)
@click.option("--threads", default=1, show_default=True)
@click.option("--lanes", default=8, show_default=True)
@click.option("--window", default=8192, show_default=True, help="Tokens of each lane.")
@click.option("--ready-file", required=True, type=click.Path(path_type=Path))
def serve_llama(model: str, threads: int, lanes: int, window: int, ready_file: Path) -> None:
    """Serve until SIGTERM, or until whoever started this is gone; the ready file says where."""
    ends = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before its threads are there
    parent = os.getppid()
    server = llama_server(
        resolve(model), threads=threads, lanes=lanes, window=window, keeps_prompts=True
    )
    address = urlsplit(server.listening_address)
    draft = ready_file.with_suffix(".draft")
    draft.write_text(json.dumps({"http": [[address.hostname, address.port]]}), encoding="utf-8")
    draft.rename(ready_file)
    while signal.sigtimedwait(ends, PARENT_SECONDS) is None and os.getppid() == parent:
        pass


@main.command("plain-folder")
@click.option("--model", required=True)
@click.option("--engine", default="", help="The engine of ours that is to read it.")
@click.argument("folder", type=click.Path(path_type=Path))
def write_folder(model: str, engine: str, folder: Path) -> None:
    """Write MODEL, a GGUF file or `demo`, as a directory of safetensors."""
    need_modules(engine)
    plain_folder(resolve(model), folder)


if __name__ == "__main__":
    try:
        main()
    except (ImportError, OSError, RuntimeError, ValueError, SuperfluidError) as error:
        click.echo(f"{type(error).__name__}: {error}", err=True)
        raise SystemExit(1) from None
