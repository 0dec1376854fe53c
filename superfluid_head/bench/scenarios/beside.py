"""Who else plays a scenario: our engines, llama-server and vLLM, each behind its own OpenAI door on this machine.

Owns how the others' servers are started, found ready and ended, by process id and with deadlines. All get the same model, the
same number of sequences at once, the window of the model and all cores; the rounds are given out elsewhere, so one of them is busy
at a time. A server of others that does not come up is said and left out; ours have to come up.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from superfluid_core.errors import SuperfluidError
from superfluid_core.modelfiles.resolve import resolve
from superfluid_head.bench.compare import VLLM_SETTINGS
from superfluid_head.bench.peers import free_port, wait_served
from superfluid_head.bench.rig import Child, Rig, RigError
from superfluid_head.bench.scenarios.base import Figures, Plan, Scenario
from superfluid_head.bench.scenarios.stage import served_name

Say = Callable[[str], None]
OUR_ENGINES = ("native", "llamacpp")
WRITE_SECONDS = 300.0
START_SECONDS = 1_200.0
END_SECONDS = 30.0
PEER_LANES = 8
# its server keeps the engine in a process of its own, and eight prompts of 6,000 tokens need room
VLLM_MORE = ("VLLM_ENABLE_V1_MULTIPROCESSING=1", "VLLM_CPU_KVCACHE_SPACE=4", "HF_HUB_OFFLINE=1")


@dataclass(slots=True)
class Player:
    """One server with its instance of the scenario. Only ours are judged."""

    name: str
    scenario: Scenario
    is_ours: bool = True
    rounds: list[Figures] = field(default_factory=list)


def alone(kind: type[Scenario], plan: Plan, stack: ExitStack) -> list[Player]:
    """Set up the one server of a plan. Raises RigError."""
    if plan.engine == "mlx":
        rig = stack.enter_context(Rig())
        plan = replace(plan, model=str(_folder(rig, plan, engine=plan.engine)))
    scenario = kind(plan)
    scenario.setup(stack)
    return [Player("peer" if plan.base_url else scenario.engine_in_use, scenario)]


def together(kind: type[Scenario], plan: Plan, stack: ExitStack, say: Say) -> list[Player]:
    """Set up all of them, one after the other. Raises RigError when one of ours does not come up."""
    players: list[Player] = []
    for engine in OUR_ENGINES:
        players += alone(kind, replace(plan, engine=engine), stack)
    rig = stack.enter_context(Rig())
    starts: dict[str, Callable[[], str]] = {"llama-server": lambda: _llama_server(rig, plan)}
    if plan.vllm_python is not None:
        python = plan.vllm_python
        starts["vllm"] = lambda: _vllm(rig, stack, plan, python)
    for name, start in starts.items():
        try:
            url = start()
            theirs = replace(plan, base_url=url, model=served_name(url), api_key=None)
            (player,) = alone(kind, theirs, stack)
        except (RigError, httpx.HTTPError) as error:
            say(f"{name}: left out: {error}")
            continue
        player.name, player.is_ours = name, False
        players.append(player)
    return players


def _threads() -> int:
    return os.cpu_count() or 1


def _llama_server(rig: Rig, plan: Plan) -> str:
    words = ["llama-server", "--model", plan.model, "--threads", str(_threads())]
    words += ["--lanes", str(PEER_LANES), "--window", str(_window(plan))]
    child = rig.spawn(
        "llama-server", [sys.executable, "-m", "superfluid_noded.bench_servers", *words]
    )
    rig.wait_ready(child)
    return child.url


def _vllm(rig: Rig, stack: ExitStack, plan: Plan, python: str) -> str:
    port = free_port()
    settings = (*VLLM_SETTINGS, *VLLM_MORE, f"OMP_NUM_THREADS={_threads()}")
    command = ["env", *settings, python, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(_folder(rig, plan)), "--served-model-name", "vllm"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", str(_window(plan)), "--max-num-seqs", str(PEER_LANES)]
    child = rig.spawn_plain("vllm", command, is_group=True)
    url = f"http://127.0.0.1:{port}"
    with ExitStack() as ending:
        ending.callback(_end, child)
        wait_served(rig, child, httpx.Request("GET", f"{url}/health"), START_SECONDS)
        stack.push(ending.pop_all())  # it serves: it ends with the others
    return url


def _window(plan: Plan) -> int:
    try:
        return resolve(plan.model).config.window
    except SuperfluidError as error:
        raise RigError(str(error)) from None


def _folder(rig: Rig, plan: Plan, *, engine: str = "") -> Path:
    """Find the model as a directory of safetensors, for vLLM or `engine` of ours: a GGUF file is written out. Raises RigError."""
    try:
        files = resolve(plan.model)
    except SuperfluidError as error:
        raise RigError(str(error)) from None
    if files.kind != "gguf":
        return files.path
    folder = rig.folder / files.name
    command = [sys.executable, "-m", "superfluid_noded.bench_servers", "plain-folder"]
    try:
        done = subprocess.run(
            [*command, "--model", plan.model, "--engine", engine, str(folder)],
            capture_output=True, text=True, timeout=WRITE_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise RigError(f"the weights were not written in {WRITE_SECONDS:.0f} s") from None
    if done.returncode != 0:
        raise RigError(f"the weights could not be written: {done.stderr.strip()[-300:]}")
    return folder


def _end(child: Child) -> None:
    """Give a server the time to end its own processes, then end what is left of its group: while it starts it does not listen."""
    child.process.terminate()
    with suppress(subprocess.TimeoutExpired):
        child.process.wait(timeout=END_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.process.wait(timeout=END_SECONDS)
