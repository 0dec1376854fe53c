"""The `llm` command line: a prompt, streamed and whole, and a schema. Its model stands in extra-openai-models.yaml."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.clients.jobs.kit import KEY, MODEL, STORY, URL, need, report

MODELS = f"""- model_id: superfluid
  model_name: {MODEL}
  api_base: {URL}/v1
  supports_schema: true
  supports_tools: true
"""


def llm(*words: str) -> str:
    command = [str(Path(sys.executable).with_name("llm")), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    need(done.returncode == 0, done.stderr)
    return done.stdout


def stream() -> None:
    text = llm("-m", "superfluid", "--key", KEY, "-o", "max_tokens", "30", STORY)
    need(len(text.split()) > 5, text)


def whole() -> None:
    text = llm("-m", "superfluid", "--key", KEY, "--no-stream", "-o", "max_tokens", "30", STORY)
    need(len(text.split()) > 5, text)


def structured() -> None:
    text = llm("-m", "superfluid", "--key", KEY, "--schema", "color, animal", "-o", "max_tokens", "200",
               "-o", "temperature", "0", "A color and an animal, a word each.")  # fmt: skip
    need(set(json.loads(text)) == {"color", "animal"}, text)


def chat() -> None:
    first = llm("-m", "superfluid", "--key", KEY, "-o", "max_tokens", "8", "Say hello.")
    again = llm("-c", "--key", KEY, "-o", "max_tokens", "8", "And goodbye.")
    need(first and again, "a conversation goes on")


if __name__ == "__main__":
    Path(os.environ["LLM_USER_PATH"], "extra-openai-models.yaml").write_text(MODELS, "utf-8")
    report(stream=stream, whole=whole, structured=structured, chat=chat)
