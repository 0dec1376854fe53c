"""The outcome of one check, and how a check is run so that its failure is an outcome too.

Owns no check. A check either passes with a figure, fails with what was found, or is left out with the reason: never in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from superfluid_core.errors import SuperfluidError

DETAIL_CHARS_MAX = 300
Verdict = Literal["ok", "failed", "left out"]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of a self-test."""

    name: str
    verdict: Verdict
    detail: str


class LeftOut(Exception):  # noqa: N818 - no error: a reason
    """Raised by a check that cannot be made here; says why."""


class Found(Exception):  # noqa: N818 - what a check is there to find
    """Raised by a check that found something wrong; says what."""


def run_check(name: str, check: Callable[[], str]) -> Check:
    """Run a check; what it returns is its figure."""
    try:
        with torch.inference_mode():
            return Check(name, "ok", check())
    except LeftOut as reason:
        return Check(name, "left out", str(reason))
    except Found as found:
        return Check(name, "failed", str(found))
    except SuperfluidError as error:
        return Check(name, "failed", error.message[:DETAIL_CHARS_MAX])
    except Exception as error:  # noqa: BLE001 - a kernel may fail in any way, and the next check runs all the same
        text = str(error).strip().split("\n")[0]
        return Check(name, "failed", f"{type(error).__name__}: {text}"[:DETAIL_CHARS_MAX])


def near(found: torch.Tensor, wanted: torch.Tensor, bound: float) -> str:
    """Compare numbers; the largest difference. Raises Found when it is beyond `bound`, or when a number is none."""
    if found.shape != wanted.shape:
        raise Found(f"shape {tuple(found.shape)}, expected {tuple(wanted.shape)}")
    off = (found.double().cpu() - wanted.double().cpu()).abs()
    largest = float(off.max()) if off.numel() else 0.0
    if not largest <= bound:
        raise Found(f"off by {largest:.3g}, {bound:g} is allowed")
    return f"off by {largest:.2g} at most"
