"""Drawing one id per row from filtered distributions, exactly and without sorting the vocabulary when 64 ids will do.

Owns temperature, top-k, min-p, top-p and the draw; knows no lanes. The draw is by inverse CDF with one uniform number per
row, so a row's id depends on its own logits, parameters and number only:

    no filter  the CDF runs over the vocabulary in id order
    filtered   the CDF runs over the kept ids, best first, ties by the lowest id

Filters apply one after the other, each to what the one before it left (top-p therefore to the renormalised rest). Every
filter keeps a prefix of the sorted row. The best 64 suffice for a row when the prefix ends above the worst of them (ids tied with the
worst might lie outside); other rows are sorted in full, with the same arithmetic and so the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from superfluid_core.engine.torch import own_kernels

CANDIDATES = 64
TOP_K_OFF = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class DrawColumns:
    """Parameters of the drawing rows, all [rows]. Filters that are off hold TOP_K_OFF, 0 and 1.

    `plain` and `filtered` are row indexes, None when empty; `unbounded` says that some filtered row has neither
    top-k nor min-p, so that its top-p is measured against the whole row.
    """

    temperature: Tensor
    top_k: Tensor
    min_p: Tensor
    top_p: Tensor
    plain: Tensor | None
    filtered: Tensor | None
    unbounded: bool

    def rows(self, index: Tensor) -> DrawColumns:
        """Cut the columns down to some of the rows."""
        return DrawColumns(
            self.temperature[index],
            self.top_k[index],
            self.min_p[index],
            self.top_p[index],
            None,
            None,
            self.unbounded,
        )


def draw(logits: Tensor, columns: DrawColumns, uniform: Tensor) -> Tensor:
    """One id per row; `logits` float32 [rows, vocabulary], `uniform` float64 [rows] in [0, 1)."""
    scaled = logits / columns.temperature.unsqueeze(1)
    if columns.filtered is None:
        return _draw_plain(scaled, uniform)
    if columns.plain is None:
        return _draw_filtered(scaled, columns, uniform)
    ids = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    plain, filtered = columns.plain, columns.filtered
    ids[plain] = _draw_plain(scaled[plain], uniform[plain])
    ids[filtered] = _draw_filtered(scaled[filtered], columns.rows(filtered), uniform[filtered])
    return ids


@cache
def _draw_open() -> Callable[[Tensor, DrawColumns, Tensor, Tensor, Tensor], None] | None:
    """Find the kernel that draws the open rows without telling the host which they are."""
    if own_kernels.gap() is not None:
        return None
    from superfluid_core.engine.torch.triton.draw import draw_open

    return draw_open


def best_first(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Find the `count` best values of each row and their ids; equal values by the lowest id."""
    values, ids = logits.topk(min(count, logits.shape[1]), dim=1)
    ids, by_id = ids.sort(dim=1)
    values, by_value = values.gather(1, by_id).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, by_value)


def _pick(cumulative: Tensor, total: Tensor, uniform: Tensor) -> Tensor:
    """First index whose cumulative weight exceeds uniform * total; an id of weight zero is never picked."""
    below = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniform * total, below).unsqueeze(1)
    found = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    return found.clamp_(max=cumulative.shape[1] - 1)


def _draw_plain(scaled: Tensor, uniform: Tensor) -> Tensor:
    weights = (scaled - scaled.amax(1, keepdim=True)).exp_()
    cumulative = weights.cumsum(1, dtype=torch.float64)
    return _pick(cumulative, cumulative[:, -1], uniform)


def _draw_filtered(scaled: Tensor, columns: DrawColumns, uniform: Tensor) -> Tensor:
    whole = None
    if columns.unbounded:
        weights = (scaled - scaled.amax(1, keepdim=True)).exp_()
        whole = weights.sum(1, dtype=torch.float64)
    vocabulary = scaled.shape[1]
    values, ids = best_first(scaled, CANDIDATES)
    if values.shape[1] == vocabulary:
        sure = torch.full_like(columns.top_k, vocabulary)
    else:
        sure = (values > values[:, -1:]).sum(1)
    chosen, done = _draw_sorted(values, sure, columns, whole, uniform)
    found = ids.gather(1, chosen.unsqueeze(1)).squeeze(1)
    kernel = _draw_open() if scaled.is_cuda else None
    if kernel is not None:
        kernel(scaled, columns, uniform, done, found)
        return found
    open_rows = (~done).nonzero().squeeze(1)
    if open_rows.shape[0]:
        rest = columns.rows(open_rows)
        found[open_rows] = draw_sorted_rows(scaled[open_rows], rest, uniform[open_rows])
    return found


def draw_sorted_rows(scaled: Tensor, columns: DrawColumns, uniform: Tensor) -> Tensor:
    """Draw from filtered rows by sorting them whole: slow, and what every faster way must equal."""
    weights = (scaled - scaled.amax(1, keepdim=True)).exp_()
    whole = weights.sum(1, dtype=torch.float64)
    values, ids = scaled.sort(dim=1, descending=True, stable=True)
    sure = torch.full_like(columns.top_k, scaled.shape[1])
    chosen, _ = _draw_sorted(values, sure, columns, whole, uniform)
    return ids.gather(1, chosen.unsqueeze(1)).squeeze(1)


def _draw_sorted(
    values: Tensor, sure: Tensor, columns: DrawColumns, whole: Tensor | None, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Index into each sorted row, and whether it is certain.

    `values` are the best of each row, best first, of which the first `sure` are certainly the row's best and complete;
    `whole` is the weight of the whole row where that can be needed.
    """
    width = values.shape[1]
    weights = (values - values[:, :1]).exp().double()
    cumulative = weights.cumsum(1)
    # survivors of top-k, then of min-p; a count that fills the width without top-k ending it may be larger
    likely = (weights >= columns.min_p.unsqueeze(1)).sum(1)
    off = columns.min_p <= 0
    likely = torch.where(off | ((likely == width) & (sure < width)), columns.top_k, likely)
    survivors = torch.minimum(columns.top_k, likely).clamp(min=1)
    seen = survivors.clamp(max=width)
    total = cumulative.gather(1, (seen - 1).unsqueeze(1)).squeeze(1)
    known = survivors <= sure
    if whole is not None:
        free = survivors == TOP_K_OFF
        total = torch.where(free, whole, total)
        known = known | free
    before = cumulative - weights
    kept = (before < (columns.top_p * total).unsqueeze(1)).sum(1)
    kept = torch.minimum(kept, seen).clamp(min=1)
    done = known & (kept <= sure)
    mass = cumulative.gather(1, (kept - 1).unsqueeze(1)).squeeze(1)
    return torch.minimum(_pick(cumulative, mass, uniform), kept - 1), done
