"""Which attention backend runs: the order, the trial, and the two libraries' calls with stand-ins that compute them plainly."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from superfluid_core.engine.torch.attention import choose
from superfluid_core.engine.torch.attention.base import AttentionShape, Site
from superfluid_core.engine.torch.attention.choose import (
    ORDER_CUDA,
    choose_attention,
    trial,
    trial_batch,
    trial_pool,
    unfit,
)
from superfluid_core.engine.torch.attention.flashinfer import FlashInferAttention
from superfluid_core.engine.torch.attention.reference import ReferenceAttention
from superfluid_core.engine.torch.attention.registry import register
from superfluid_core.engine.torch.attention.varlen import VarlenAttention
from superfluid_core.engine.torch.cuda import setup
from superfluid_core.engine.torch.kvcache import KvPool
from superfluid_core.errors import ConfigError

CPU = torch.device("cpu")
SHAPE = AttentionShape(6, 2, 16)
HERE = Site(CPU, torch.float32, 4, SHAPE)
THERE = Site(torch.device("cuda"), torch.bfloat16, 16, SHAPE)


def answers(monkeypatch: pytest.MonkeyPatch, reasons: dict[str, str]) -> None:
    monkeypatch.setattr(choose, "unfit", lambda name, _site: reasons.get(name))


def test_the_first_that_works_is_taken_and_the_others_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert ORDER_CUDA == ("flashinfer", "varlen", "triton", "padded")
    answers(monkeypatch, {"flashinfer": "not installed", "varlen": "wrong capability"})
    told: list[tuple[str, str]] = []
    assert choose_attention("auto", THERE, lambda *why: told.append(why)) == "triton"
    assert told == [("flashinfer", "not installed"), ("varlen", "wrong capability")]


def test_one_that_was_asked_for_is_never_silently_another(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, {"varlen": "wrong capability"})
    with pytest.raises(ConfigError, match="--attention-backend varlen: wrong capability"):
        choose_attention("varlen", THERE)
    assert choose_attention("padded", THERE) == "padded"


def test_when_nothing_works_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, dict.fromkeys(ORDER_CUDA, "broken"))
    with pytest.raises(ConfigError, match="no attention backend works"):
        choose_attention("auto", THERE)


@pytest.mark.parametrize("name", ["flashinfer", "varlen", "triton"])
def test_without_a_device_kernels_say_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "interpreted", lambda: False)
    assert unfit(name, HERE) == "it needs a CUDA device"
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        choose_attention(name, HERE)


def test_a_backend_that_ignores_a_soft_cap_is_not_taken_for_one() -> None:
    capped = Site(CPU, torch.float32, 4, AttentionShape(6, 2, 16, soft_cap=5.0))
    assert unfit("varlen", capped) == "it knows no soft cap"
    for name in ("padded", "reference"):
        assert unfit(name, capped) is None


class Wrong(ReferenceAttention):
    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        out = super().run(layer, queries, keys, values)
        out[-1, 0] += 0.1
        return out


class Broken(ReferenceAttention):
    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        raise RuntimeError("no kernel image\nfor this device")


class Nowhere(ReferenceAttention):
    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return super().run(layer, queries, keys, values) * float("nan")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Wrong, "off by 0.1"), (Broken, "RuntimeError: no kernel image"), (Nowhere, "off by nan")],
)
def test_a_trial_finds_out(
    kind: type[ReferenceAttention], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("superfluid_core.engine.torch.attention.registry.BACKENDS", {})
    register("odd", kind)
    found = trial("odd", HERE)
    assert found is not None
    assert reason in found


class Failing(ReferenceAttention):
    failure: Exception

    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        raise self.failure


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (OutOfResources(106_752, 101_376, "shared memory"), "OutOfResources: out of resource"),
        (FileNotFoundError(2, "No such file or directory", "ninja"), "FileNotFoundError: "),
        (PermissionError(13, "Permission denied", "/srv/kernels"), "PermissionError: "),
        (subprocess.CalledProcessError(1, ["gcc"]), "CalledProcessError: Command"),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Exception) else "",
)
def test_whatever_a_kernel_or_its_compiler_fails_with_passes_it_over(
    failure: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("superfluid_core.engine.torch.attention.registry.BACKENDS", {})
    monkeypatch.setattr(Failing, "failure", failure, raising=False)
    register("odd", Failing)
    found = trial("odd", HERE)
    assert found is not None
    assert found.startswith(reason)


def test_heads_that_flashinfer_has_no_kernel_for_cost_no_compiling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
    site = replace(THERE, shape=AttentionShape(32, 32, 80))
    assert unfit("flashinfer", site) == "it has no kernels for heads of 80 numbers"


def test_steps_are_not_recorded_with_the_reference_where_our_own_attention_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(setup, "unfit", lambda *_: "no C compiler")
    reason = "our own attention does not work here, no C compiler"
    assert setup.recording_gap("padded", THERE) == reason
    assert setup.recording_gap("triton", THERE) is None
    assert setup.recording_gap("padded", HERE) is None  # a CPU records for tests only
    assert setup.recorded_backend("padded", trial_pool(HERE), HERE) == "reference"
    monkeypatch.setattr(setup, "unfit", lambda *_: None)
    assert setup.recording_gap("padded", THERE) is None
    assert setup.recorded_backend("padded", trial_pool(HERE), HERE) == "triton"


def test_a_right_one_passes_its_trial() -> None:
    for window in (None, 3):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            assert trial("padded", Site(CPU, dtype, 4, AttentionShape(6, 2, 16, window))) is None


# --- the libraries ---------------------------------------------------------------------------------


def plain(queries: Tensor, keys: Tensor, values: Tensor, left: int) -> Tensor:
    """Attend the last len(queries) positions of one row, written out; `left` -1 sees all, n sees n back."""
    group = queries.shape[1] // keys.shape[1]
    wide = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,chd->hqc", queries, wide[0]) * queries.shape[-1] ** -0.5
    at = torch.arange(len(keys) - len(queries), len(keys)).unsqueeze(1)
    seen = torch.arange(len(keys))
    hidden = (seen > at) | ((seen < at - left) if left >= 0 else torch.zeros_like(seen > at))
    return torch.einsum("hqc,chd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), wide[1])


def varlen_attn(query: Tensor, key: Tensor, value: Tensor, *shape: Any, **more: Any) -> Tensor:
    """What torch's function of this name promises, row by row."""
    cu_seq_q, cu_seq_k, max_q, max_k = shape
    window_size, enable_gqa = more.pop("window_size"), more.pop("enable_gqa")
    seqused_k, block_table = more.pop("seqused_k"), more.pop("block_table")
    assert not more
    assert cu_seq_k is None
    assert cu_seq_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    assert enable_gqa == (query.shape[1] != key.shape[2])
    assert window_size[1] == 0
    starts = cu_seq_q.tolist()
    out = []
    for row, context in enumerate(seqused_k.tolist()):
        assert starts[row + 1] - starts[row] <= max_q
        assert context <= max_k
        past = [part[block_table[row].long()].flatten(0, 1)[:context] for part in (key, value)]
        out.append(plain(query[starts[row] : starts[row + 1]], past[0], past[1], window_size[0]))
    return torch.cat(out)


class Wrapper:
    """A paged wrapper of FlashInfer: plans by page tables, then attends."""

    def __init__(self, workspace: Tensor, layout: str, **_: Any) -> None:
        assert (workspace.dtype, layout) == (torch.uint8, "NHD")
        self._rows: list[tuple[slice, list[int], int]] = []
        self._left = -1

    def _keep(
        self, starts: Sequence[int], indptr: Tensor, indices: Tensor, last: Tensor, size: int
    ) -> None:
        assert indptr.dtype == indices.dtype == last.dtype == torch.int32
        bounds = indptr.tolist()
        self._rows = []
        for row, length in enumerate(last.tolist()):
            pages = indices[bounds[row] : bounds[row + 1]].tolist()
            assert 1 <= length <= size
            own = slice(starts[row], starts[row + 1])
            self._rows.append((own, pages, (len(pages) - 1) * size + length))

    def run(self, queries: Tensor, kv: tuple[Tensor, Tensor]) -> Tensor:
        out = []
        for own, pages, context in self._rows:
            past = [part[pages].flatten(0, 1)[:context] for part in kv]
            out.append(plain(queries[own], past[0], past[1], self._left))
        return torch.cat(out)


class DecodeWrapper(Wrapper):
    def plan(self, *tables: Any, window_left: int, **_: Any) -> None:
        indptr, indices, last, *sizes = tables
        assert sizes[:3] == [6, 2, 16]
        self._left = window_left
        self._keep(range(len(last) + 1), indptr, indices, last, sizes[3])


class PrefillWrapper(Wrapper):
    def plan(self, *tables: Any, causal: bool, window_left: int, **_: Any) -> None:
        starts, indptr, indices, last, *sizes = tables
        assert sizes[:3] == [6, 2, 16]
        assert causal
        self._left = window_left
        self._keep(starts.tolist(), indptr, indices, last, sizes[3])


class FlashInfer:
    BatchDecodeWithPagedKVCacheWrapper = DecodeWrapper
    BatchPrefillWithPagedKVCacheWrapper = PrefillWrapper


def backend(name: str, pool: KvPool, shape: AttentionShape) -> Any:
    if name == "varlen":
        return VarlenAttention(pool, shape, varlen_attn)
    return FlashInferAttention(pool, shape, FlashInfer)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("name", ["flashinfer", "varlen"])
def test_a_library_is_asked_for_the_step_that_was_planned(
    name: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("superfluid_core.engine.torch.attention.flashinfer.WORKSPACE_BYTES", 16)
    shape = AttentionShape(6, 2, 16, window)
    site = Site(CPU, torch.float32, 4, shape)
    batch, pools = trial_batch(site), (trial_pool(site), trial_pool(site))
    parts = [torch.randn(batch.tokens, heads, 16) for heads in (6, 2, 2)]
    outs = []
    for made in (backend(name, pools[0], shape), ReferenceAttention(pools[1], shape)):
        made.plan(batch)
        outs.append(made.run(0, *parts))
    torch.testing.assert_close(outs[0], outs[1], atol=1e-5, rtol=1e-5)
    assert torch.equal(pools[0].keys[0], pools[1].keys[0])
