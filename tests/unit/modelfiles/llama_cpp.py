"""llama.cpp as the judge: its tokenizer over a model file, and tiny model files for it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp

FULL_NAMES = {
    "chat_template": "tokenizer.chat_template",
    "chat_template_tools": "tokenizer.chat_template.tool_use",
    "split_count": "split.count",
}


class LlamaCpp:
    """llama.cpp's server over one GGUF, asked for token ids."""

    def __init__(self, path: Path) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = 64
        params.n_batch = 32
        params.n_parallel = 1
        params.cpuparams.n_threads = 1
        params.warmup = False
        params.fit_params = False
        params.verbosity = 0
        params.hostnames = ["127.0.0.1"]
        params.port = 0
        self._server = xllamacpp.Server(params)
        host = self._server.listening_address.removeprefix("http://")
        self._connection = http.client.HTTPConnection(host, timeout=30)

    def tokens(self, text: str, *, special: bool, add_bos: bool = False) -> list[int]:
        return list(
            self._ask(
                "/tokenize", {"content": text, "parse_special": special, "add_special": add_bos}
            )["tokens"]
        )

    def piece(self, token: int) -> bytes:
        """The bytes of one token as llama.cpp spells it."""
        found = self._ask("/detokenize", {"tokens": [token]})["content"]
        return str(found).encode()

    def close(self) -> None:
        self._connection.close()
        del self._server

    def _ask(self, route: str, body: dict[str, Any]) -> Any:
        self._connection.request(
            "POST", route, json.dumps(body), {"content-type": "application/json"}
        )
        answer = self._connection.getresponse()
        data = answer.read()
        assert answer.status == 200, data
        return json.loads(data)


def write_tiny_llama(path: Path, tokens: Sequence[str], fields: dict[str, Any]) -> None:
    """A random llama of one layer around a vocabulary: enough for llama.cpp to load it.

    `fields` are `tokenizer.ggml.*` values by the rest of their name (`FULL_NAMES` aside); lists
    become arrays.
    """
    width, feed = 32, 32
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(feed)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(width // 2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_token_list(list(tokens))
    for name, value in fields.items():
        _add(writer, FULL_NAMES.get(name, f"tokenizer.ggml.{name}"), value)
    draw = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, draw.standard_normal(shape, dtype=np.float32) * 0.02)

    add("token_embd.weight", len(tokens), width)
    add("output_norm.weight", width)
    add("blk.0.attn_norm.weight", width)
    add("blk.0.ffn_norm.weight", width)
    add("blk.0.attn_q.weight", width, width)
    add("blk.0.attn_k.weight", width // 2, width)
    add("blk.0.attn_v.weight", width // 2, width)
    add("blk.0.attn_output.weight", width, width)
    add("blk.0.ffn_gate.weight", feed, width)
    add("blk.0.ffn_up.weight", feed, width)
    add("blk.0.ffn_down.weight", width, feed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
