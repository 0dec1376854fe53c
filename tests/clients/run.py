"""Programs that people use, each doing its ordinary job against the demo model: a table, exit 1 when something failed.

    python -m tests.clients.run [--only NAME ...] [--folder FOLDER]

Each program is installed by name into an environment of its own (nothing of it gets into ours; a folder that is given is kept and
used again), then a server is started on loopback and the jobs run one after the other, each within a time limit. Only
the installation needs a network. See docs/clients.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from dataclasses import dataclass
from pathlib import Path

import httpx

from superfluid_head.bench.rig import Rig
from superfluid_head.bench.small_fleet import wait_linked

ROOT = Path(__file__).resolve().parents[2]
JOBS = Path(__file__).parent / "jobs"
INSTALL_S = 900
JOB_S = 420
SERVE = ("demo", "--tool-call-parser", "hermes", "--embedding-pooling", "mean")


@dataclass(frozen=True, slots=True)
class Program:
    """One program: what is installed, the job that uses it, and whose version is shown."""

    name: str
    job: str
    packages: tuple[str, ...]

    @property
    def is_python(self) -> bool:
        return self.job.endswith(".py")


PROGRAMS = (
    Program("llm", "use_llm.py", ("llm",)),
    Program("litellm", "use_litellm.py", ("litellm",)),
    Program("langchain", "use_langchain.py", ("langchain-openai",)),
    Program("instructor", "use_instructor.py", ("instructor",)),
    Program("pydantic-ai", "use_pydantic_ai.py", ("pydantic-ai-slim[openai]",)),
    Program("smolagents", "use_smolagents.py", ("smolagents[openai]",)),
    Program("lm-eval", "use_lm_eval.py", ("lm_eval[api]",)),
    Program("ai-sdk", "use_ai_sdk.mjs", ("ai@5", "@ai-sdk/openai-compatible@1")),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One line of the table: what was done, with what error or none."""

    program: str
    version: str
    what: str
    error: str


class CannotRunError(Exception):
    """Raised when a program cannot be installed or did not tell how it went."""


def call(command: list[str], limit_s: int, **options: object) -> str:
    try:
        done = subprocess.run(  # type: ignore[call-overload]
            command, capture_output=True, text=True, timeout=limit_s, check=False, **options
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotRunError(f"{command[0]}: {type(error).__name__}") from None
    if done.returncode:
        raise CannotRunError(f"{' '.join(command[:4])}: {done.stderr.strip()[-400:]}")
    return str(done.stdout)


def install(program: Program, folder: Path) -> str:
    """Install a program unless it is there; returns its version."""
    first = program.packages[0].partition("[")[0]
    if not program.is_python:
        folder.mkdir(parents=True, exist_ok=True)
        name = first.rpartition("@")[0]
        if not (folder / "node_modules" / name).exists():
            npm = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder)]
            call([*npm, *program.packages], INSTALL_S)
        text = (folder / "node_modules" / name / "package.json").read_text("utf-8")
        return str(json.loads(text)["version"])
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    call([*pip, *program.packages], INSTALL_S)
    said = f"import importlib.metadata as m; print(m.version({first!r}))"
    return call([str(python), "-c", said], 60).strip()


def surroundings(url: str, model: str, home: Path, modules: Path) -> dict[str, str]:
    """The environment of a job: the server, a home of its own, and no way out by accident."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    return kept | {
        "CLIENT_URL": url, "CLIENT_MODEL": model, "CLIENT_KEY": "none", "CLIENT_MODULES": str(modules),
        "HOME": str(home), "LLM_USER_PATH": str(home), "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1",
        "HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }  # fmt: skip


def work(program: Program, folder: Path, url: str, model: str) -> list[tuple[str, str]]:
    """Run a job; returns what it did and with what error."""
    interpreter = str(folder / "bin" / "python") if program.is_python else "node"
    with tempfile.TemporaryDirectory() as home:
        around = surroundings(url, model, Path(home), folder)
        said = call([interpreter, str(JOBS / program.job)], JOB_S, env=around, cwd=home)
    lines = [json.loads(line) for line in said.splitlines() if line.startswith('{"what"')]
    if not lines:
        raise CannotRunError("the job told nothing")
    return [(line["what"], line["error"]) for line in lines]


def outcomes(program: Program, folder: Path, url: str, model: str) -> list[Outcome]:
    version = "?"
    try:
        version = install(program, folder)
        return [
            Outcome(program.name, version, what, error)
            for what, error in work(program, folder, url, model)
        ]
    except CannotRunError as error:
        return [Outcome(program.name, version, "-", str(error))]


def show(rows: list[Outcome]) -> None:
    names = dict.fromkeys((row.program, row.version) for row in rows)
    for name, version in names:
        mine = [row for row in rows if row.program == name]
        works = " ".join(row.what for row in mine if not row.error)
        print(f"{name:<12} {version:<10} {works}")
        for row in mine:
            if row.error:
                print(f"{'':<12} FAILED     {row.what}: {row.error}")


def run(programs: list[Program], folder: Path) -> list[Outcome]:
    rows: list[Outcome] = []
    with Rig() as rig:
        head = rig.start_head(*SERVE)
        rig.wait_ready(head)
        wait_linked(rig, head, 1)
        served = httpx.get(f"{head.url}/v1/models", timeout=20, trust_env=False).json()
        model = str(served["data"][0]["id"])
        for program in programs:
            began = time.monotonic()
            found = outcomes(program, folder / program.name, head.url, model)
            show(found)
            print(f"{'':<12} {time.monotonic() - began:.0f} s", flush=True)
            rows += found
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [program.name for program in PROGRAMS]
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    parser.add_argument("--folder", type=Path, help="keep the environments here")
    asked = parser.parse_args()
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="superfluid-clients-"))
    try:
        rows = run([each for each in PROGRAMS if each.name in asked.only], folder.resolve())
    finally:
        if asked.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    failed = sum(bool(row.error) for row in rows)
    print(f"{len(rows) - failed} jobs of {len(asked.only)} programs done, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
