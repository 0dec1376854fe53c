"""Other routers in front of the bare application: how each is started, from an environment that somebody else made.

Those that an environment does not have are left out. Nothing is installed here. They are given the route that is measured and
nothing else: no keys, no logs, one worker behind.
"""

from __future__ import annotations

import socket
from pathlib import Path

import httpx

from superfluid_head.bench.rig import Child, Rig, RigError

START_SECONDS = 60.0
ASK_SECONDS = 5.0
PAUSE_SECONDS = 0.2
ROUTERS = {"vllm_router": ("vllm-router",), "sglang_router": ("sglang-router", "launch")}


def start_peers(rig: Rig, venv: Path, backend: str, model: str) -> list[tuple[str, Child, str]]:
    """Start whatever is there; gives name, process, URL. Raises RigError when one does not come up."""
    found: list[tuple[str, Child, str]] = []
    for name in ("vllm_router", "sglang_router", "litellm"):
        port = free_port()
        command = _command(rig, venv, name, port, backend, model)
        if command is None:
            continue
        child = rig.spawn_plain(name, command)
        url = f"http://127.0.0.1:{port}"
        wait_served(rig, child, chat_request(url, model), START_SECONDS)
        found.append((name, child, url))
    return found


def _command(
    rig: Rig, venv: Path, name: str, port: int, backend: str, model: str
) -> list[str] | None:
    if name == "litellm":
        program = venv / "bin" / "litellm"
        if not program.exists():
            return None
        config = rig.folder / "litellm.yaml"
        config.write_text(
            "model_list:\n"
            f"  - model_name: {model}\n"
            "    litellm_params:\n"
            f"      model: openai/{model}\n"
            f"      api_base: {backend}/v1\n"
            "      api_key: none\n"
            "general_settings:\n"
            "  dangerously_permit_weak_or_unset_master_key: true\n",
            encoding="utf-8",
        )
        return [str(program), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    own, *command = ROUTERS[name]
    program = venv / "bin" / own
    if not program.exists():
        return None
    words = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", backend]
    words += ["--prometheus-port", str(free_port())]
    return [str(program), *command, *words, "--policy", "round_robin", "--log-level", "error"]


def free_port() -> int:
    """Find a TCP port of loopback that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def chat_request(url: str, model: str) -> httpx.Request:
    """Compose a short streamed chat, which a router passes on once it has found who answers."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    return httpx.Request("POST", f"{url}/v1/chat/completions", json={**body, "stream": True})


def wait_served(rig: Rig, child: Child, question: httpx.Request, seconds: float) -> None:
    """Put `question` again and again until it is answered well. Raises RigError when `child` ends or the time is over."""
    deadline_ms = rig.now_ms() + seconds * 1000
    # a client's own limit is only for the requests that it builds
    question.extensions["timeout"] = httpx.Timeout(ASK_SECONDS).as_dict()
    with httpx.Client(trust_env=False) as client:
        while True:
            try:
                if client.send(question).is_success:
                    return
            except httpx.HTTPError:
                pass
            if not child.is_running or rig.now_ms() > deadline_ms:
                raise RigError(f"{child.name} does not serve:\n{child.log_end()}")
            rig.sleep(PAUSE_SECONDS)
