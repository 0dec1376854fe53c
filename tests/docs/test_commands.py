"""The commands of README.md and docs/: all are parsed, and what can be run in a moment is run, before a small fleet of the simulated engine.

What a text writes in capitals, its addresses and its files are replaced by ours; flags that are added make a run small and take nothing
away. A command that is only parsed has its reason in PARSED; a new one that is in no table fails.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import httpx
import pytest

from superfluid_head import cli as head
from superfluid_head.bench.rig import Rig
from superfluid_noded import cli as noded
from tests.docs.commands import ROOT, TEXTS, Line, complaint, every_line, find, lines_of

DOCS_URL = "http://127.0.0.1:8453"
HEAVY = "minutes, or several processes; tests/unit/head_bench runs its parts"
PARSED = {
    ("bench", "compare"): HEAVY,
    ("bench", "engine"): HEAVY,
    ("bench", "structured"): HEAVY,
    ("bench", "scenario"): HEAVY,
    ("selftest",): "a minute of kernels; tests/unit/engine_cuda runs its checks",
    ("inspect",): "seconds of trials on this CPU; tests/unit/noded runs it",
}
"""What is only parsed, and why."""
ADDED = {
    ("serve",): (),
    ("fleet",): (), ("top",): (), ("completion",): (), ("config",): (), ("chat",): ("--max-tokens", "4"),
    ("bench", "scenario", "list"): (),
    ("bench", "placement"): (),
    ("bench", "serve"): ("--requests", "1", "--rounds", "1", "--max-tokens", "2", "--concurrency", "1"),
    ("simulate", "list"): (), ("simulate", "run"): (), ("simulate", "sweep"): (), ("simulate", "trace"): (),
    ("simulate", "replay"): (),
    ("simulate", "fleet"): ("--nodes", "4", "--sessions", "40"),
}  # fmt: skip
"""What is run, and what is added to make it small."""
OURS = {"--engine", "--model", "--identity", "--listen", "--metrics", "--check"}
"""What the test says of a node itself."""
SLOW_SCENARIOS = ("littles-law", "swap-or-recompute")
"""Seconds; tests/unit/simulator asserts what they find."""
LINES = {line.words: line for line in sorted(every_line(), key=lambda line: line.is_whole)}
RUNNING = {words: line for words, line in LINES.items() if line.program == "superfluid"}
CHECKED = [line for line in LINES.values() if line.program == "superfluid-noded" and line.is_whole]
CURLED = [line for line in LINES.values() if line.program == "curl" and line.is_whole]


def rule(words: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the longest rule that a command of `superfluid` falls under."""
    known = [key for key in (*ADDED, *PARSED) if words[1 : 1 + len(key)] == key]
    return max(known, key=len, default=None)


def is_run(line: Line) -> bool:
    """Whether it is a whole command, and none of those that are only parsed."""
    key, words = rule(line.words), line.words
    if key is None or key in PARSED or any(name in words for name in SLOW_SCENARIOS):
        return False
    if "..." in words or "--help" in words:
        return False
    return line.is_whole or (words[1] not in ("serve", "config") and _is_runnable(line))


def _is_runnable(line: Line) -> bool:
    """Whether a mention is a whole command: click misses nothing."""
    try:
        command, rest = find(line.words)
        with command.make_context(command.name, list(rest)):
            return not isinstance(command, click.Group) and "N" not in rest
    except (click.ClickException, click.exceptions.Exit):
        return False


@pytest.mark.parametrize("name", TEXTS)
def test_every_command_of_a_text_is_taken_by_its_parser(name: str) -> None:
    wrong = {str(line): complaint(line) for line in lines_of(name) if line.program.startswith("superfluid")}  # fmt: skip
    assert not {line: why for line, why in wrong.items() if why}


def test_every_command_is_run_or_has_its_reason() -> None:
    groups = {"superfluid", "superfluid bench", "superfluid simulate", "superfluid fleet"}
    unruled = [str(line) for words, line in RUNNING.items() if rule(words) is None]
    assert not [each for each in unruled if each.partition(": ")[2] not in groups]
    assert sum(map(is_run, RUNNING.values())) > 50
    assert len(CHECKED) > 8
    assert len(CURLED) > 8


@pytest.mark.parametrize(
    ("row", "is_right"),
    [
        ("superfluid serve demo --class-lanes agent=2 2> log & SERVE=$!", True),
        ("superfluid serve demo --wokers 2 &", False),
        ("superfluid serve demo --fleet h --workers 0", False),
        ("superfluid serve demo --fleet h --workers", False),
        ("superfluid fleet statsu", False),
        ("superfluid fleet why", False),
        ("MODEL=x superfluid top --interval never", False),
        ("cat key && /opt/superfluid/bin/superfluid-noded --model demo --max-batch none", False),
        ("superfluid-noded --model demo --listen off \\\n      --join head:8452", True),
    ],
)
def test_a_wrong_command_would_be_found(row: str, is_right: bool) -> None:
    for content in (f"```sh\n{row}\n```\n", f"    {row}\n"):
        found = [
            line for line in lines_of("x.md", content) if line.program.startswith("superfluid")
        ]
        assert len(found) == 1
        assert (complaint(found[0]) is None) == is_right


def test_a_mention_may_be_cut_short_but_not_wrong() -> None:
    text = "`superfluid fleet why`, `superfluid bench\nengine --record-costs`, `superfluid serve --fleet ... --workers N`"
    lines = lines_of("x.md", text)
    assert [complaint(line) for line in lines] == [None, None, None]
    (wrong,) = lines_of("x.md", "`superfluid serve ... --fleet-lisen h:1`")
    assert complaint(wrong) is not None


def test_targets_and_modules_that_texts_name_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.M))
    settings = set(re.findall(r"^#   ([A-Z_]+)=", makefile, re.M))
    for line in every_line():
        if line.program == "make":
            named = [word for word in line.words[1:] if "=" not in word]
            given = {word.partition("=")[0] for word in line.words[1:] if "=" in word}
            assert set(named) <= targets, line
            assert given <= settings, line
        elif line.program.startswith("python") and line.words[1] == "-m" and len(line.words) > 2:
            assert importlib.util.find_spec(line.words[2]) is not None, line


@dataclass
class Stage:
    """A node, a head and a folder of files, for the commands of the texts."""

    url: str
    folder: Path
    key: Path
    request: str
    model: str

    def words(self, line: Line) -> list[str]:
        """Replace what stands for the reader's own."""
        known = {"NODE": "node-a", "REQUEST": self.request, "MODEL": "demo", "NAME": self.model, "FILE": "recording.jsonl"}  # fmt: skip
        words = [known.get(word, word).replace(DOCS_URL, self.url) for word in line.words]
        return [self.local(word) for word in words]

    def local(self, word: str) -> str:
        """Put a file of /etc into our folder, and demo in the place of a model that would be fetched."""
        return re.sub(r"^/etc/superfluid/", f"{self.folder}/", word).replace("Qwen/Qwen3-8B", "demo").replace("Qwen/Qwen3-0.6B", "demo")  # fmt: skip


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("reader")
    recording = folder / "recording.jsonl"
    flags = ("--engine", "mock", "--model", "demo", "--mock-eos", "0", "--metrics", "off")
    with Rig() as rig:
        key = rig.make_key()
        first = rig.start_node("node-b", *flags, "--record", str(recording), key=key)
        node = rig.start_node("node-a", *flags, key=key)
        rig.wait_ready(first, node)
        running = rig.start_head(
            "demo", "--embedding-pooling", "mean", nodes=[first.listen, node.listen], key=key
        )
        rig.wait_ready(running)
        made = Stage(running.url, folder, key, "req-of-the-reader", "")
        made.model = _ask(made, rig)
        _write_files(folder, key)
        yield made


def _ask(stage: Stage, rig: Rig) -> str:
    """Have one request placed, by an id that can be asked for; returns the model's name."""
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    headers = {"x-request-id": stage.request}
    with httpx.Client(base_url=stage.url, timeout=30, trust_env=False) as client:
        for _ in range(200):
            if client.get("/readyz").status_code == 200 and all(
                node["is_up"] for node in client.get("/v1/fleet").json()["nodes"]
            ):
                break
            rig.sleep(0.1)
        models: list[str] = []
        for number in range(4):  # both nodes get some: one of them records
            name = headers if number == 0 else {}
            reply = client.post("/v1/chat/completions", json=body, headers=name)
            assert reply.status_code == 200, reply.text
            models.append(reply.json()["model"])
        return models[0]


def _write_files(folder: Path, key: Path) -> None:
    (row,) = re.findall(r"^```json\n(.*?)^```", (ROOT / "docs/simulator.md").read_text("utf-8"), re.M | re.S)[:1]  # fmt: skip
    (folder / "arrivals.jsonl").write_text(row)
    rows = [[1, 10_000_000], [512, 90_000_000]]
    costs = {"format": "superfluid-costs/1", "decode": rows, "prefill": rows, "context_ps": 0}
    (folder / "costs.json").write_text(json.dumps(costs))
    shutil.copy(key, folder / "fleet.key")
    shutil.copy(ROOT / "deploy/noded.toml", folder / "noded.toml")
    policy = {"keys": [{"name": "ops", "key_sha256": "0" * 64, "admin": True}]}
    (folder / "keys.json").write_text(json.dumps(policy))
    (folder / "keys.json").chmod(0o600)


def _small(line: Line, stage: Stage) -> list[str]:
    """Return the arguments with which a command is run."""
    key = rule(line.words)
    assert key is not None
    arguments = stage.words(line)[1:]
    if key == ("serve",):
        arguments = ["config", "check", *arguments[1:]]
    command, _ = find(("superfluid", *arguments))
    has_url = any(parameter.name == "url" for parameter in command.params)
    arguments += ["--url", stage.url] if has_url and "--url" not in arguments else []
    if line.words[1:3] == ("fleet", "key"):
        arguments = [*arguments[:2], f"made-{len(list(stage.folder.iterdir()))}.key"]
    return [*arguments, *ADDED[key]]


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("line", [line for line in RUNNING.values() if is_run(line)], ids=str)
def test_what_texts_tell_to_run_runs(
    line: Line,
    stage: Stage,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(stage.folder)
    monkeypatch.setattr("builtins.input", _nobody)
    try:
        status = head.run(_small(line, stage))
    except SystemExit as left:  # benches end the program with their verdict
        status = int(str(left.code))
    told = capsys.readouterr()
    is_measured = line.words[1:3] == ("bench", "placement")  # its bar is a time
    assert status == 0 or is_measured, told.err
    assert told.out.strip() or line.words[1] == "chat"


def _nobody(_prompt: str = "") -> str:
    raise EOFError


def _own(words: list[str]) -> list[str]:
    """What is left of a node's command when engine, model and place are ours."""
    found, at = [], 0
    while at < len(words):
        if words[at] in OURS and words[at + 1 : at + 2] != ["off"]:
            at += 1 if words[at] == "--check" else 2
        else:
            found.append(words[at])
            at += 1
    return found


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize(
    "line", {tuple(_own([*line.words])): line for line in CHECKED}.values(), ids=str
)
def test_what_texts_tell_nodes_is_a_node_that_could_serve(
    line: Line, stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own --check judges model, key and addresses; the engine is the simulated one, and ports are free ones of loopback."""
    monkeypatch.chdir(stage.folder)
    given = _own(stage.words(line)[1:])
    own = ["--check", "--engine", "mock", "--metrics", "off", "--model", "demo"]
    own += [] if "off" in given else ["--listen", "127.0.0.1:0"]
    own += [] if "--auth-file" in given else ["--auth-file", "fleet.key"]
    status = noded.run([*given, *own])
    told = capsys.readouterr()
    assert status == 0, told.out + told.err
    assert told.out.rstrip().endswith("ok")


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("line", CURLED, ids=str)
def test_what_texts_ask_with_curl_is_answered(line: Line, stage: Stage) -> None:
    words = [word.replace("SmolLM2-135M-Instruct", stage.model) for word in stage.words(line)]
    command = [*words, "--fail-with-body", "--max-time", "30", "--noproxy", "*"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=40, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()
