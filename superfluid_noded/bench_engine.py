"""One contender of `superfluid bench compare`: loads a model, then measures on request, a JSON line in and a JSON line out.

    {"measure": "decode", "streams": 8, "tokens": 64, "round": 1}  ->  {"tok_s": 301.2}
    {"measure": "prefill", "streams": 1, "tokens": 512, "round": 1} ->  {"tok_s": 3934.0}

One definition for all: token times are stamped where the contender's user would see them. Decode is every token after the moment when all
streams had their first one, over the time from that moment to the last token; prefill is the prompt over the time to
the first token. Prompts are random ids, new in every round, so no cache helps anybody; everything is greedy and ends at
its length. torch, xllamacpp and transformers are imported only by the contender that needs them.
"""

from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import click

from superfluid_core.clock import SECOND, SystemClock
from superfluid_core.errors import SuperfluidError
from superfluid_core.limits import SchedulerLimits
from superfluid_core.modelfiles.resolve import ModelFiles, resolve
from superfluid_core.scheduler.plan import Emits, Finish, Reject, StepDone, Submit
from superfluid_core.scheduler.scheduler import PoolShape, Scheduler
from superfluid_core.session import SamplingParams, SessionKey, SessionSpec
from superfluid_noded import bench_costs
from superfluid_noded.bench_peers import SglangContender, VllmContender
from superfluid_noded.bench_servers import llama_server
from superfluid_noded.config import cache_dir, settle_threads

STREAMS_MAX = 8
STREAMS_MAX_CUDA = 64
WINDOW = 2048
DECODE_PROMPT_TOKENS = 16
CLOCK = SystemClock()
Times = list[list[int]]


class Contender(Protocol):
    """Runs greedy streams to their length and says when each token came (ns of one clock)."""

    about: str

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> Times: ...


def random_prompts(vocabulary: int, streams: int, length: int, seed: int) -> list[list[int]]:
    """Draw ids from the middle of the vocabulary: no special ids, no byte ids."""
    source = random.Random(seed)
    low, high = vocabulary // 8, vocabulary - 8
    return [[source.randrange(low, high) for _ in range(length)] for _ in range(streams)]


class NativeContender:
    """Our scheduler and our torch engine, in this process and this thread."""

    def __init__(
        self,
        files: ModelFiles,
        threads: int,
        device: str = "auto",
        cache: Path | None = None,
        lanes: int | None = None,
        weights: str = "auto",
    ) -> None:
        settle_threads()
        import torch

        from superfluid_core.engine.torch.build import TorchOptions, build_torch_engine

        is_wide = device != "cpu" and torch.cuda.is_available()
        lanes = lanes or (STREAMS_MAX_CUDA if is_wide else STREAMS_MAX)
        options = TorchOptions(
            device=device,
            lanes=lanes,
            window=WINDOW,
            threads=threads or None,
            weights=weights,
            cache_dir=cache,
        )
        self.engine = build_torch_engine(files, options)
        info = self.engine.describe()
        self.about = f"{info.engine_build}, {info.dtype} on {info.device}, {threads} threads"
        limits = SchedulerLimits(lanes=lanes, step_tokens=info.step_tokens)
        pool = PoolShape(info.block_tokens, info.blocks, info.window)
        self.scheduler = Scheduler(limits, pool, cuts_are_free=info.cuts_are_free)
        self._sessions = 0

    def _submit(self, prompts: Sequence[Sequence[int]], tokens: int) -> dict[SessionKey, list[int]]:
        times: dict[SessionKey, list[int]] = {}
        for prompt in prompts:
            self._sessions += 1
            key = SessionKey("bench", self._sessions)
            times[key] = []
            spec = SessionSpec(
                key, "bench", tuple(prompt), tokens, sampling=SamplingParams(temperature=0.0)
            )
            self._judge(self.scheduler.receive([Submit(spec)], CLOCK.now_ns()), times, set())
        return times

    @staticmethod
    def _judge(
        effects: Sequence[object], times: dict[SessionKey, list[int]], left: set[SessionKey]
    ) -> None:
        now_ns = CLOCK.now_ns()
        for effect in effects:
            if isinstance(effect, Emits):
                for key in effect.keys:
                    times[key].append(now_ns)
            elif isinstance(effect, Finish):
                left.discard(effect.key)
            elif isinstance(effect, Reject):
                raise RuntimeError(f"refused: {effect.text}")  # noqa: TRY004 - not a wrong type

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> Times:
        times = self._submit(prompts, tokens)
        left = set(times)

        def on_step(step: StepDone) -> None:
            self._judge(self.scheduler.receive([step], CLOCK.now_ns()), times, left)

        while left:
            plan = self.scheduler.plan(CLOCK.now_ns())
            if plan is None:
                raise RuntimeError("the scheduler plans nothing although sessions are left")
            done = self.engine.run(plan, on_step, lambda: False)
            self._judge(self.scheduler.receive([done], CLOCK.now_ns()), times, left)
        return list(times.values())


class LlamaServerContender:
    """llama-server of the xllamacpp wheel in this process, asked over HTTP: streaming /completion of token ids."""

    def __init__(self, files: ModelFiles, threads: int) -> None:
        import httpx

        self._server = llama_server(
            files, threads=threads, lanes=STREAMS_MAX, window=WINDOW, keeps_prompts=False
        )
        self._http = httpx.Client(
            base_url=self._server.listening_address, timeout=300, trust_env=False
        )
        self.about = (
            f"llama-server of xllamacpp, -np {STREAMS_MAX}, the GGUF as it is, {threads} threads"
        )

    def _stream(self, prompt: Sequence[int], tokens: int, begin: threading.Barrier) -> list[int]:
        body = {
            "prompt": list(prompt), "n_predict": tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "cache_prompt": False,
        }  # fmt: skip
        times: list[int] = []
        begin.wait(timeout=60)
        with self._http.stream("POST", "/completion", json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if not line.startswith("data:"):
                    continue
                event = json.loads(line[5:])
                times += [CLOCK.now_ns()] * len(event.get("tokens", ()))
                if event.get("stop"):
                    break
        return times

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> Times:
        begin = threading.Barrier(len(prompts))
        with ThreadPoolExecutor(max_workers=len(prompts)) as pool:
            jobs = [pool.submit(self._stream, prompt, tokens, begin) for prompt in prompts]
            return [job.result(timeout=300) for job in jobs]


class TransformersContender:
    """`generate` of transformers, one static batch; a stopping criterion that never stops stamps the steps."""

    def __init__(self, files: ModelFiles, threads: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        self._torch = torch
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if self._device == "cuda" or has_fast_bf16() else torch.float32
        if files.kind == "gguf":
            model = transformers_from_gguf(files, dtype)
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(str(files.path), dtype=dtype)
        self._model = model.to(self._device).eval()
        self.about = (
            f"transformers {transformers.__version__}, {dtype} on {self._device}, {threads} threads"
        )

    def run(self, prompts: Sequence[Sequence[int]], tokens: int) -> Times:
        torch, steps = self._torch, []

        def stamp(ids: Any, _scores: Any, **_: Any) -> Any:
            steps.append(CLOCK.now_ns())
            return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)

        ids = torch.tensor([list(prompt) for prompt in prompts], device=self._device)
        with torch.inference_mode():
            self._model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
                max_new_tokens=tokens, min_new_tokens=tokens, stopping_criteria=[stamp],
            )  # fmt: skip
        return [list(steps) for _ in prompts]


def transformers_from_gguf(files: ModelFiles, dtype: Any) -> Any:
    """Build the transformers model of a GGUF file, with the file's weights.

    Its own loader wants one more package, so the weights come through our reader; the computing is all theirs.
    """
    import torch
    import transformers

    from superfluid_core.engine.torch.sources import GgufSource

    c = files.config
    if c.family not in ("llama", "qwen2", "qwen3"):
        raise RuntimeError(f"{c.family} is not translated for transformers")
    if c.rope_scaling.kind != "default":
        raise RuntimeError(
            f"rotary scaling {c.rope_scaling.kind!r} is not translated for transformers"
        )
    config = transformers.AutoConfig.for_model(
        c.family, vocab_size=c.vocabulary, hidden_size=c.hidden, intermediate_size=c.intermediate,
        num_hidden_layers=c.layers, num_attention_heads=c.heads, num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim, rms_norm_eps=c.norm_eps, max_position_embeddings=c.window,
        tie_word_embeddings=c.tied_embeddings, attention_bias=c.attention_bias,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
    )  # fmt: skip
    make: Any = transformers.AutoModelForCausalLM
    model = make.from_config(config, dtype=dtype)
    with GgufSource(Path(files.path), c, torch.device("cpu"), dtype) as source, torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(source.get(name))
    return model


def has_fast_bf16() -> bool:
    """Whether this CPU multiplies bf16 itself; the same question that our engine's `--dtype auto` asks."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            flags = next((line for line in file if line.startswith("flags")), "")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


CONTENDERS: dict[str, Callable[[ModelFiles, int], Contender]] = {
    "native": lambda files, threads: NativeContender(files, threads, cache=cache_dir(None)),
    "torch-ops": NativeContender,
    "llama-server": LlamaServerContender,
    "transformers": TransformersContender,
    "vllm": VllmContender,
    "sglang": SglangContender,
}


@dataclass(frozen=True, slots=True)
class Request:
    """One line of input. `round` seeds the prompts: equal for all contenders, new in every round."""

    measure: str
    streams: int
    tokens: int
    round: int


def rate(contender: Contender, vocabulary: int, request: Request) -> float:
    """Tokens per second of one measure, as the module's first lines define it."""
    seed = request.round * 1000 + request.streams
    if request.measure == "prefill":
        prompts = random_prompts(vocabulary, 1, request.tokens, seed)
        started_ns = CLOCK.now_ns()
        times = contender.run(prompts, 1)
        return request.tokens * SECOND / (times[0][0] - started_ns)
    prompts = random_prompts(vocabulary, request.streams, DECODE_PROMPT_TOKENS, seed)
    times = contender.run(prompts, request.tokens)
    if any(len(stream) != request.tokens for stream in times):
        raise RuntimeError(
            f"streams of {sorted({len(s) for s in times})} tokens, not {request.tokens}"
        )
    all_began_ns = max(stream[0] for stream in times)
    counted = sum(1 for stream in times for at_ns in stream if at_ns > all_began_ns)
    return counted * SECOND / (max(stream[-1] for stream in times) - all_began_ns)


def serve(name: str, files: ModelFiles, threads: int, device: str) -> None:
    """Load, say what was loaded, answer until the input ends."""
    contender: Contender = (
        NativeContender(files, threads, device, cache_dir(None))
        if name == "native"
        else CONTENDERS[name](files, threads)
    )
    click.echo(json.dumps({"about": contender.about}))
    for line in sys.stdin:
        request = Request(**json.loads(line))
        click.echo(json.dumps({"tok_s": rate(contender, files.config.vocabulary, request)}))


def record(files: ModelFiles, threads: int, path: Path, repeats: int) -> None:
    """Write what steps of our engine cost, for `superfluid simulate`."""
    engine = NativeContender(files, threads, cache=cache_dir(None)).engine
    bench_costs.record_costs(engine, files.name, path, max(1, repeats), click.echo)


@click.command(help="One contender of `superfluid bench compare`: JSON lines in, JSON lines out.")
@click.option("--contender", type=click.Choice(list(CONTENDERS)), default="native")
@click.option("--model", default="demo", show_default=True)
@click.option("--threads", default=1, show_default=True, help="0 leaves it to our engine.")
@click.option("--device", default="auto", show_default=True, help="Of our engine.")
@click.option("--record-costs", metavar="FILE", help="Measure steps for the simulator instead.")
@click.option("--repeats", default=5, show_default=True, help="Of every step, for --record-costs.")
def main(
    contender: str, model: str, threads: int, device: str, record_costs: str | None, repeats: int
) -> None:
    try:
        if record_costs is None:
            serve(contender, resolve(model), threads, device)
        else:
            record(resolve(model), threads, Path(record_costs), repeats)
    except (ImportError, OSError, RuntimeError, ValueError, SuperfluidError) as error:
        click.echo(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
