"""32 requests at once on the demo model: one shared beginning, against 32 different prompts. A script, not a test.

python -m tests.unit.engine_torch.bench_prefix [prefix tokens] [requests] [threads]

Prints how many prompt tokens were computed and the median time to the first token of the burst. The burst of different
prompts ends when its median is known.
"""

from __future__ import annotations

import sys
from statistics import median

from superfluid_noded.config import settle_threads

settle_threads()

import torch  # noqa: E402 - what it does with threads is settled when it is loaded

from superfluid_core.clock import SECOND  # noqa: E402
from superfluid_core.engine.torch.build import TorchOptions, build_torch_engine  # noqa: E402
from superfluid_core.engine.torch.engine import TorchEngine  # noqa: E402
from superfluid_core.modelfiles.resolve import resolve  # noqa: E402
from tests.unit.engine_torch.box import CLOCK, Box, spec  # noqa: E402

TAIL = 14
OUTPUT = 4


def ids(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(200, 48_000, (count,), generator=generator).tolist()


def burst(engine: TorchEngine, prompts: list[list[int]]) -> tuple[Box, float]:
    """Submit all, run until more than half have their first token; seconds of the median."""
    box = Box(engine)
    began_ns = CLOCK.now_ns()
    box.submit(*(spec(n, prompt, OUTPUT) for n, prompt in enumerate(prompts)))
    while True:
        first = sorted(times[0] for times in box.times_ns.values() if times)
        if len(first) > len(prompts) // 2:
            middle = first[(len(prompts) - 1) // 2 : len(prompts) // 2 + 1]
            return box, (median(middle) - began_ns) / SECOND
        box.turn()


def main(prefix: int = 4986, requests: int = 32, threads: int | None = None) -> None:
    files = resolve("demo")
    window = prefix + TAIL + OUTPUT + 16
    blocks = (8 * window) // 16 + 64
    options = TorchOptions(lanes=8, window=window, kv_blocks=blocks, threads=threads)
    shared = ids(prefix, 1)
    kinds = {
        "shared": [[*shared, *ids(TAIL, 100 + n)] for n in range(requests)],
        "different": [ids(prefix + TAIL, 1000 + n) for n in range(requests)],
    }
    for name, prompts in kinds.items():
        box, ttft_s = burst(build_torch_engine(files, options), prompts)
        if name == "shared":
            box.finish(*range(requests))
        computed = sum(count for step in box.steps for _, count in step.prefilled)
        hits = box.scheduler.stats().prefix_hit_tokens
        told = f"{computed} prompt tokens computed, {hits} found in the cache"
        if name == "different":
            told += " until the median was known"
        sys.stdout.write(
            f"{requests} x {prefix + TAIL} tokens, {name}: median TTFT {ttft_s:.2f} s, {told}\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
