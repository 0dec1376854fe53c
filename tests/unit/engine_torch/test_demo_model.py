"""The demo model, as the engine runs it, against transformers and llama.cpp: greedy ids in float32, token for token.

Both references get the numbers that the `gguf` package decodes: transformers as a state dict, llama.cpp as an F32 GGUF
(its quantized kernels round differently by design, so the Q4_1 file itself is never compared).
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from superfluid_core.engine.torch.drive import Driver
from superfluid_core.engine.torch.engine import TorchEngine

OUTPUT = 40
WINDOW = 256
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "The three primary colours are",
    "In 1969, the first humans",
    "Dear Sir or Madam,\n\nI am writing to",
    "import numpy as np\n\n",
    "A haiku about autumn:\n",
    "Q: What is 12 times 12?\nA:",
    "SELECT name FROM users WHERE",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
    "The quick brown fox jumps over the lazy dog. " * 8,
]


Decoded = dict[str, np.ndarray[Any, np.dtype[np.float32]]]


@pytest.fixture(scope="module")
def decoded(demo_path: Path) -> Decoded:
    """Every tensor of the demo model in float32, as the `gguf` package decodes it."""
    import gguf

    return {
        tensor.name: np.array(
            gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32, order="C"
        )
        for tensor in gguf.GGUFReader(demo_path).tensors
    }


def write_f32(source: Path, decoded: Decoded, target: Path) -> None:
    """Write a GGUF file with the metadata of another and its tensors in float32."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        made_anew = key.startswith("GGUF.") or key in (
            "general.architecture",
            "general.file_type",
            "general.quantization_version",
        )
        if not made_anew:
            is_array = field.types[0] == gguf.GGUFValueType.ARRAY
            kind = field.types[-1] if is_array else None
            writer.add_key_value(key, field.contents(), field.types[0], kind)
    writer.add_file_type(0)
    for name, numbers in decoded.items():
        writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def transformers_demo(decoded: Decoded) -> Any:
    """The demo model in transformers, with the numbers that the `gguf` package decodes."""
    import transformers
    from transformers.initialization import no_init_weights

    heads = {"attn_q": 9, "attn_k": 3}
    parts = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
        **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
        "attn_output": "self_attn.o_proj",
    }
    named = {"token_embd.weight": "model.embed_tokens", "output_norm.weight": "model.norm"}
    state: dict[str, torch.Tensor] = {}
    for own, numbers in decoded.items():
        name, kept = named.get(own), numbers
        if name is None:
            _, layer, part, _ = own.split(".")
            name = f"model.layers.{layer}.{parts[part]}"
            if part in heads:
                turned = numbers.reshape(heads[part], 32, 2, 576).swapaxes(1, 2)
                kept = turned.reshape(numbers.shape)
        state[f"{name}.weight"] = torch.from_numpy(kept)
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rope_theta=100_000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    with no_init_weights():
        model = transformers.LlamaForCausalLM(config).eval()
    model.tie_weights()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"]
    assert not unexpected
    return model


class LlamaCpp:
    """A llama.cpp server in this process, reached over loopback; one thread, float32 cache, nothing kept."""

    def __init__(self, path: Path, slots: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.kv_unified = WINDOW * slots, slots, False
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.hostnames, params.port = ["127.0.0.1"], 0
        params.warmup = params.fit_params = params.cache_prompt = False
        params.cache_ram_mib, params.verbosity, params.no_extra_bufts = 0, 0, True
        self._server = xllamacpp.Server(params)
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def tokenize(self, text: str) -> list[int]:
        asked = {"content": text, "parse_special": True, "add_special": False}
        ids: list[int] = self._post("/tokenize", asked)["tokens"]
        return ids

    def greedy(self, prompt: list[int]) -> list[int]:
        asked = {"prompt": prompt, "n_predict": OUTPUT, "temperature": 0.0}
        asked |= {"return_tokens": True, "ignore_eos": True, "cache_prompt": False}
        ids: list[int] = self._post("/completion", asked)["tokens"]
        return ids

    def _post(self, route: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self._server.listening_address + route,
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with self._open(request, timeout=240) as reply:
            return json.loads(reply.read())


@pytest.fixture(scope="module")
def engine(demo_path: Path, build_engine: Callable[..., TorchEngine]) -> Iterator[TorchEngine]:
    made = build_engine(demo_path, lanes=len(PROMPTS), window=WINDOW)
    yield made
    made.close()


def ours(
    engine: TorchEngine, prompts: list[list[int]], *, ban: tuple[int, ...] = (), **cut: int
) -> list[list[int]]:
    """Greedy ids of all prompts together; `ban` are ids that are never drawn."""
    blocks = engine.describe().blocks
    driver = Driver(engine, blocks=[(block * 7 + 5) % blocks for block in range(blocks)])
    sessions = [driver.open(p, OUTPUT, min_output=OUTPUT, stop_ids=ban) for p in prompts]
    driver.finish(**cut)
    return [session.outputs for session in sessions]


@pytest.mark.reference
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_greedy_ids_equal_llama_cpp_on_the_same_float32_weights(
    demo_path: Path, decoded: Decoded, engine: TorchEngine, tmp_path: Path
) -> None:
    path = tmp_path / "demo-f32.gguf"
    write_f32(demo_path, decoded, path)
    reference = LlamaCpp(path, slots=len(PROMPTS))
    prompts = [reference.tokenize(text) for text in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        expected = list(pool.map(reference.greedy, prompts))
    # ignore_eos bans every end-of-generation id of llama.cpp's: this model's end of text and end of turn
    found = ours(engine, prompts, ban=engine.describe().eos_ids, steps=8, prompt_tokens=50)
    assert [len(ids) for ids in expected] == [OUTPUT] * len(PROMPTS)
    assert found == expected


@pytest.mark.reference
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_greedy_ids_and_logits_equal_transformers(decoded: Decoded, engine: TorchEngine) -> None:
    model = transformers_demo(decoded)
    generator = torch.Generator().manual_seed(11)
    prompts = [
        torch.randint(100, 40_000, (length,), generator=generator).tolist()
        for length in (3, 60, 100)
    ]
    seen: dict[int, torch.Tensor] = {}
    engine.on_logits = lambda rows, logits: seen.update(
        {row.lane: line.clone() for row, line in zip(rows, logits, strict=True)}
    )
    driver = Driver(engine)
    sessions = [driver.open(prompt, OUTPUT) for prompt in prompts]
    driver.finish(steps=7, prompt_tokens=33, step_tokens=40)
    engine.on_logits = None
    for session, prompt in zip(sessions, prompts, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([session.context[:-1]])).logits[0]
        assert session.outputs == logits[len(prompt) - 1 :].argmax(-1).tolist()
        torch.testing.assert_close(seen[session.lane], logits[-1], atol=5e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_batched_chunked_paged_ids_equal_each_context_computed_anew_and_alone(
    engine: TorchEngine, demo_path: Path, build_engine: Callable[..., TorchEngine]
) -> None:
    generator = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(100, 40_000, (length,), generator=generator).tolist()
        for length in (1, 17, 90)
    ]
    together = ours(engine, prompts, steps=5, prompt_tokens=13, step_tokens=24)
    plain = build_engine(demo_path, lanes=1, window=WINDOW, attention="reference")
    for prompt, ids in zip(prompts, together, strict=True):
        for count in (0, 1, 11, 39):
            driver = Driver(plain)
            alone = driver.open([*prompt, *ids[:count]], 1)
            driver.finish()
            assert alone.outputs == [ids[count]]
