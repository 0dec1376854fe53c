"""What every endpoint of one head shares, handed to them once by `app.py`; nothing here is global.

Also answers which model a request means: by its exact served name, or the only one when none is named. Names are the
nodes'; the tokenizer behind a name is found by the fingerprint of its text files, so a renamed model is still read right. Whoever
asks for models sees those of the caller's key only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from superfluid_core.clock import Clock
from superfluid_core.errors import CapacityError, ErrorCode
from superfluid_core.limits import HttpLimits
from superfluid_core.tracing.context import Tracer
from superfluid_head.access.keys import CALLER, KeyRing
from superfluid_head.access.quotas import Quotas
from superfluid_head.access.rules import AccessRules
from superfluid_head.api.errors import invalid, model_not_allowed, model_not_found
from superfluid_head.api.inflight import Inflight
from superfluid_head.api.ports import FleetDoor, Served
from superfluid_head.api.qos import QosDesk, QosRules
from superfluid_head.api.sampling import salt
from superfluid_head.api.sessions import SessionBook
from superfluid_head.metrics import HeadMetrics
from superfluid_head.text.chat import ModelText


@dataclass(frozen=True, slots=True)
class Target:
    """A model as clients see it. `text` is None while the head has no tokenizer for it."""

    name: str
    window: int
    is_up: bool
    eos_ids: frozenset[int] = frozenset()
    text: ModelText | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Head:
    """The shared parts. `texts` are the tokenizers and templates of the models that this head was given."""

    fleet: FleetDoor
    texts: Sequence[ModelText]
    keys: KeyRing
    metrics: HeadMetrics
    inflight: Inflight
    clock: Clock
    limits: HttpLimits = field(default_factory=HttpLimits)
    created_s: int = 0
    version: str = "0"
    warnings: tuple[str, ...] = ()
    debug_headers: bool = False
    is_reasoning_doubled: bool = False
    embedding_pooling: str = "none"
    qos: QosDesk = field(default_factory=lambda: QosDesk(QosRules()))
    sessions: SessionBook = field(default_factory=SessionBook)
    prefix_shared: bool = False
    quotas: Quotas = field(default_factory=Quotas)
    access: AccessRules = field(default_factory=AccessRules)
    tracer: Tracer | None = None
    worker_ends: Callable[[], Mapping[str, int]] = dict

    def prefix_salt(self, tenant: str, cache_salt: str | None) -> bytes:
        """Return what keeps cached prefixes apart: tenants unless they share, and what a request asks for on top."""
        if self.prefix_shared and cache_salt is None:
            return b""
        return salt("" if self.prefix_shared else tenant, cache_salt)

    def models(self) -> dict[str, Target]:
        """Return the models that the caller may use."""
        caller, every = CALLER.get(), self._every()
        if caller is None or caller.models is None:
            return every
        return {name: target for name, target in every.items() if caller.may_use(name)}

    def model(self, name: str) -> Target:
        """Find a model of this very name. Raises ApiError: 404 when there is none, 403 when it is not the caller's."""
        served = next((each for each in self.fleet.models() if each.name == name), None)
        found = self._every().get(name) if served is None else self._seen(served)
        if found is None:
            raise model_not_found(name)
        caller = CALLER.get()
        if caller is not None and not caller.may_use(name):
            raise model_not_allowed(name)
        return found

    def _every(self) -> dict[str, Target]:
        """Return every model that nodes serve or served, and those configured that no node ever offered."""
        found = {served.name: self._seen(served) for served in self.fleet.models()}
        used = {id(target.text) for target in found.values()}
        for text in self.texts:
            if id(text) not in used and text.name not in found:
                found[text.name] = Target(text.name, text.window, False, text.eos_ids, text)
        return found

    def _seen(self, served: Served) -> Target:
        text = self._text_of(served)
        ends = frozenset(served.eos_ids) or (frozenset() if text is None else text.eos_ids)
        return Target(served.name, served.window, served.is_up, ends, text)

    def _text_of(self, served: Served) -> ModelText | None:
        """Find the tokenizer by fingerprint; by name only for nodes that tell none."""
        for text in self.texts:
            is_it = text.name == served.name if not served.text else text.fingerprint == served.text
            if is_it:
                return text
        return None

    def target(self, name: str | None) -> tuple[Target, ModelText]:
        """Find the model. Raises ApiError: 404 when unknown, 403 when not the caller's, 400 when none is named of several."""
        if name is None:
            models = self.models()
            if len(models) != 1:
                known = ", ".join(sorted(models)[:8])
                raise invalid(f"model is missing; served: {known}", param="model")
            name = next(iter(models))
        target = self.model(name)
        if target.text is None:
            raise CapacityError(
                "this head has no tokenizer of that model yet",
                code=ErrorCode.MODEL_LOADING,
                retry_after_ms=1_000,
            )
        return target, target.text

    def can_serve(self) -> bool:
        """Whether at least one model can be served end to end now."""
        return self.fleet.health().is_ready and any(
            target.is_up and target.text is not None for target in self._every().values()
        )
