"""llama.cpp as a `Library`: one model, one context, one cache that all sequences share.

Owns the two pointers and the columns of a batch. A step is one `llama_decode` over the rows of all lanes, cut only where it is larger
than a batch. Which sequence has which cells is worked out by `Sequences`; what that forgot is computed here from the lane's own
tokens, before the first step of its tick. With sliding windows llama.cpp reuses cells that no window reaches any more, whoever
kept them: such models get no shelves and share nothing between lanes, each lane computes its whole context.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from superfluid_core.engine.compose import StepRow
from superfluid_core.engine.llamacpp.binding import (
    FLASH_ATTENTION_OFF,
    KV_TYPES,
    SEQUENCES_MAX,
    Batch,
    Binding,
)
from superfluid_core.engine.llamacpp.sequences import Move, Sequences, Tag
from superfluid_core.errors import ConfigError, EngineError
from superfluid_core.scheduler.plan import LaneStart, TickPlan

MICRO_BATCH = 512
SHELVES_MAX = 120  # llama.cpp keeps a row of logits for every sequence that could be
NO_ROOM = 1


class Shape(NamedTuple):
    """Sizes of a context: tokens of its cache, of a batch, of a block; lanes; numbers of the cache; where layers are."""

    cache_tokens: int
    batch_tokens: int
    block_tokens: int
    lanes: int
    kv_type: str
    threads: int
    is_offloaded: bool


class _Row(NamedTuple):
    """Tokens of one lane, at consecutive positions."""

    lane: int
    position: int
    inputs: Sequence[int]
    samples: bool


class LlamaLibrary:
    """Implements `Library`."""

    def __init__(self, binding: Binding, path: str, shape: Shape) -> None:
        self._binding = binding
        self._shape = shape
        self._model, self._context = _load(binding, path, shape)
        self._memory = binding.call("llama_get_memory", self._context)
        vocabulary = binding.call("llama_model_get_vocab", self._model)
        self.vocabulary = int(binding.call("llama_vocab_n_tokens", vocabulary))
        self.reach = int(binding.call("llama_model_n_swa", self._model))
        self.shares_prefixes = not self.reach
        shelves = _shelves(shape.lanes) if self.shares_prefixes else 0
        self._sequences = Sequences(shape.lanes, shelves, shape.block_tokens)
        self._columns = _Columns(shape.batch_tokens)
        self._contexts: dict[int, tuple[int, ...]] = {}

    # --- as a `Library`

    def open(self, plan: TickPlan) -> None:
        """Bring the cache to where a plan begins."""
        for lane in plan.frees:
            self._leave(lane)
        for start in plan.starts:
            self._leave(start.lane)
            self._contexts[start.lane] = _context(start)
        for each in plan.lanes:
            placed = self._sequences.place(each.lane, each.blocks, each.computed)
            self._apply(placed.moves)
            missing = self._contexts.pop(each.lane, ())[placed.filled : each.computed]
            if placed.filled + len(missing) != each.computed:
                raise EngineError(
                    f"lane {each.lane} has {placed.filled} of {each.computed} positions"
                )
            if missing:
                self._decode([_Row(each.lane, placed.filled, missing, samples=False)])
                self._sequences.wrote(each.lane, each.computed)

    def forward(self, rows: Sequence[StepRow]) -> Tensor:
        """Feed a step."""
        wanted = [_Row(row.lane, row.position, row.inputs, row.samples) for row in rows]
        logits = self._decode(wanted)
        for row in rows:
            self._sequences.wrote(row.lane, row.position + len(row.inputs))
        return logits

    def close(self) -> None:
        self._binding.call("llama_free", self._context)
        self._binding.call("llama_model_free", self._model)

    # --- within

    def _leave(self, lane: int) -> None:
        self._contexts.pop(lane, None)
        self._apply(self._sequences.free(lane))

    def _apply(self, moves: Sequence[Move]) -> None:
        call, memory = self._binding.call, self._memory
        for move in moves:
            if isinstance(move, Tag):
                call("llama_memory_seq_cp", memory, move.source, move.target, move.first, move.end)
            elif not call("llama_memory_seq_rm", memory, move.sequence, move.first, move.end):
                raise EngineError("llama.cpp cannot take a part of a sequence out of its cache")

    def _decode(self, rows: Sequence[_Row]) -> Tensor:
        """Compute all rows, a batch at a time; gives the logits of those that sample."""
        found = torch.empty((sum(row.samples for row in rows), self.vocabulary))
        done = 0
        for part in _cut(rows, self._shape.batch_tokens):
            places = self._columns.fill(part)
            self._run()
            for place in places:
                line = self._binding.call("llama_get_logits_ith", self._context, place)
                if not line:
                    raise EngineError(f"llama.cpp: no logits: {self._binding.complaint()}")
                target = found[done]
                ctypes.memmove(target.data_ptr(), line, target.nbytes)
                done += 1
        return found

    def _run(self) -> None:
        """Compute the filled batch; where the cache has no room what only shelves hold is given up first."""
        code = self._binding.call("llama_decode", self._context, self._columns.batch)
        if code == NO_ROOM:
            self._apply(self._sequences.clear_shelves())
            code = self._binding.call("llama_decode", self._context, self._columns.batch)
        if code:
            raise EngineError(f"llama.cpp: decode failed ({code}): {self._binding.complaint()}")


class _Columns:
    """The memory of a batch, made once: llama.cpp reads it where it is."""

    def __init__(self, tokens_max: int) -> None:
        pointer = ctypes.POINTER(ctypes.c_int32)
        self._token = (ctypes.c_int32 * tokens_max)()
        self._pos = (ctypes.c_int32 * tokens_max)()
        self._sequence = (ctypes.c_int32 * tokens_max)()
        self._counts = (ctypes.c_int32 * tokens_max)(*[1] * tokens_max)
        self._wanted = (ctypes.c_int8 * tokens_max)()
        size = ctypes.sizeof(ctypes.c_int32)
        first = ctypes.addressof(self._sequence)
        self._pointers = (pointer * tokens_max)(
            *[ctypes.cast(first + place * size, pointer) for place in range(tokens_max)]
        )
        self.batch = Batch(
            0, self._token, None, self._pos, self._counts, self._pointers, self._wanted
        )

    def fill(self, rows: Sequence[_Row]) -> list[int]:
        """Write the rows; gives the places whose logits are wanted."""
        places = []
        at = 0
        for row in rows:
            count = len(row.inputs)
            end = at + count
            self._token[at:end] = list(row.inputs)
            self._pos[at:end] = list(range(row.position, row.position + count))
            self._sequence[at:end] = [row.lane] * count
            self._wanted[at:end] = [0] * count
            if row.samples:
                self._wanted[end - 1] = 1
                places.append(end - 1)
            at = end
        self.batch.n_tokens = at
        return places


def _cut(rows: Sequence[_Row], tokens_max: int) -> Iterator[list[_Row]]:
    """Cut rows into batches."""
    part: list[_Row] = []
    room = tokens_max
    for row in rows:
        fed = 0
        while fed < len(row.inputs):
            if not room:
                yield part
                part, room = [], tokens_max
            some = row.inputs[fed : fed + room]
            is_last = fed + len(some) == len(row.inputs)
            part.append(_Row(row.lane, row.position + fed, some, row.samples and is_last))
            fed += len(some)
            room -= len(some)
    if part:
        yield part


def _context(start: LaneStart) -> tuple[int, ...]:
    return (*start.spec.prompt, *start.outputs)


def _shelves(lanes: int) -> int:
    return min(SHELVES_MAX, SEQUENCES_MAX - lanes)


def _load(binding: Binding, path: str, shape: Shape) -> tuple[int, int]:
    """Load a model and make its context. Raises EngineError or ConfigError; nothing is left behind then."""
    params = binding.call("llama_model_default_params")
    params.n_gpu_layers = -1 if shape.is_offloaded else 0
    binding.complaint()
    model = binding.call("llama_model_load_from_file", path.encode(), params)
    if not model:
        raise EngineError(f"llama.cpp cannot load the model: {binding.complaint()}")
    kinds = ("llama_model_is_recurrent", "llama_model_is_hybrid", "llama_model_has_encoder")
    if any(binding.call(kind, model) for kind in kinds):
        binding.call("llama_model_free", model)
        raise ConfigError("--engine llamacpp runs decoders whose state is their KV, and no others")
    context = binding.call("llama_init_from_model", model, _context_params(binding, shape))
    if not context:
        binding.call("llama_model_free", model)
        raise EngineError(f"llama.cpp cannot make a context: {binding.complaint()}")
    return model, context


def _context_params(binding: Binding, shape: Shape) -> ctypes.Structure:
    params = binding.call("llama_context_default_params")
    params.n_ctx = shape.cache_tokens
    params.n_batch = shape.batch_tokens
    params.n_ubatch = min(MICRO_BATCH, shape.batch_tokens)
    params.n_seq_max = shape.lanes + _shelves(shape.lanes)
    params.n_outputs_max = params.n_seq_max  # it insists on one for each
    params.n_threads = params.n_threads_batch = shape.threads
    params.type_k = params.type_v = KV_TYPES[shape.kv_type][0]
    params.kv_unified = True
    params.offload_kqv = params.op_offload = shape.is_offloaded
    if shape.kv_type == "float32":
        params.flash_attn_type = FLASH_ATTENTION_OFF
    result: ctypes.Structure = params
    return result
