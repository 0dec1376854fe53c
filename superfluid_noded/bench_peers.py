"""vLLM and SGLang as contenders, and the speed part of `superfluid selftest`: one engine after the other, each in its process.

Owns how they are asked for greedy streams of a given length and how their tokens are stamped. Both are imported only by the process
that measures them; a device's memory is free again when that process is gone.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from superfluid_core.clock import SECOND, SystemClock
from superfluid_core.modelfiles.resolve import ModelFiles

CLOCK = SystemClock()
WINDOW = 2048
MEASURE_SECONDS = 1_800.0
TAIL_CHARS = 300
PEERS = {"native": "torch", "vllm": "vllm", "sglang": "sglang"}
STREAMS = {"cpu": (1, 8), "cuda": (1, 8, 64)}
TOKENS = {"cpu": 32, "cuda": 256}
PREFILL = {"cpu": 256, "cuda": 1024}
Times = list[list[int]]


def plain_weights(files: ModelFiles, folder: str) -> str:
    """Where a model lies that vLLM reads: a GGUF file, which it may not read on this device, is written out as bf16 before."""
    if files.kind != "gguf":
        return str(files.path)
    import torch

    from superfluid_noded.bench_engine import transformers_from_gguf

    transformers_from_gguf(files, torch.bfloat16).save_pretrained(folder)
    return folder


class VllmContender:
    """vLLM's engine, stepped in this thread; every step's new ids are stamped when it returns."""

    def __init__(self, files: ModelFiles, threads: int) -> None:
        import vllm

        del (
            threads
        )  # its process has been told by its environment, and the rest of a device is its own
        self._vllm = vllm
        with tempfile.TemporaryDirectory(prefix="superfluid-vllm-") as folder:
            arguments = vllm.EngineArgs(
                model=plain_weights(files, folder),
                max_model_len=WINDOW,
                enable_prefix_caching=False,
                skip_tokenizer_init=True,
            )
            self._engine = vllm.LLMEngine.from_engine_args(arguments)
        self._asked = 0
        self.about = f"vllm {vllm.__version__}"

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> Times:
        sampling = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        times: dict[str, list[int]] = {}
        for prompt in prompts:
            self._asked += 1
            times[str(self._asked)] = []
            self._engine.add_request(str(self._asked), {"prompt_token_ids": list(prompt)}, sampling)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                seen = times[output.request_id]
                seen += [CLOCK.now_ns()] * (len(output.outputs[0].token_ids) - len(seen))
        return list(times.values())


class SglangContender:
    """SGLang's engine, streaming; a chunk's new ids are stamped when it arrives."""

    def __init__(self, files: ModelFiles, threads: int) -> None:
        import sglang

        del threads  # it has the device to itself
        self._engine: Any = sglang.Engine(
            model_path=str(files.path), context_length=WINDOW, disable_radix_cache=True
        )
        self.about = f"sglang {sglang.__version__}"

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> Times:
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        times: Times = [[] for _ in prompts]
        stream = self._engine.generate(
            input_ids=[list(prompt) for prompt in prompts], sampling_params=sampling, stream=True
        )
        for chunk in stream:
            seen = times[chunk.get("index", 0)]
            seen += [CLOCK.now_ns()] * (chunk["meta_info"]["completion_tokens"] - len(seen))
        return times


def speed_lines(
    model: str, device: str, seconds: float = MEASURE_SECONDS
) -> Iterator[dict[str, Any]]:
    """Measure every engine that is installed; a line per figure, or one that says why there is none.

    `seconds` are for all engines, ours first.
    """
    end_ns = CLOCK.now_ns() + round(seconds * SECOND)
    kind = device.partition(":")[0]
    requests = [
        {"measure": "decode", "streams": streams, "tokens": TOKENS[kind]}
        for streams in STREAMS[kind]
    ]
    requests.append({"measure": "prefill", "streams": 1, "tokens": PREFILL[kind]})
    for name, package in PEERS.items():
        if importlib.util.find_spec(package) is None:
            yield {"engine": name, "left out": f"{package} is not installed"}
        elif name != "native" and kind == "cpu":
            yield {"engine": name, "left out": "compared on a GPU only"}
        else:
            left = max(1.0, (end_ns - CLOCK.now_ns()) / SECOND)
            yield from _measured(name, model, device, requests, left)


def _measured(
    name: str, model: str, device: str, requests: Sequence[dict[str, Any]], seconds: float
) -> Iterator[dict[str, Any]]:
    command = [sys.executable, "-m", "superfluid_noded.bench_engine"]
    command += ["--contender", name, "--model", model, "--device", device, "--threads", "0"]
    warm = [json.dumps(request | {"round": 0}) for request in requests]
    counted = [json.dumps(request | {"round": 1}) for request in requests]
    text = "\n".join((*warm, *counted, ""))
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield {"engine": name, "error": f"no end in {seconds:.0f} s"}
        return
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    figures = [answer["tok_s"] for answer in answers if "tok_s" in answer][len(requests) :]
    if len(figures) < len(requests):
        said = next((answer["error"] for answer in answers if "error" in answer), "")
        yield {"engine": name, "error": said or done.stderr[-TAIL_CHARS:].strip()}
        return
    for request, figure in zip(requests, figures, strict=True):
        yield {"engine": name, **request, "tok_s": round(figure, 1)}
