"""Which nodes there are and which models they serve, remembered beyond the life of a link.

Addresses come from `--fleet`; identities and offers from each node's WELCOME. Two rules are kept here. An identity is live at one
address only: a second one is refused by name. A model name stands for one set of weights: another build under the same
name is refused while the first one is up, unless mixing is allowed. A model whose nodes are all gone stays listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from superfluid_core.errors import ConfigError
from superfluid_core.placement.view import Offer
from superfluid_core.session import Determinism
from superfluid_core.wire.announced import tenant_lanes_of
from superfluid_core.wire.messages import ModelOffer, Welcome
from superfluid_head.fleet.nodesfile import read_nodes

PORT_DEFAULT = 8454
NODES_MAX = 1_024


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """Where a node listens. Port 0: not known yet, or it dials us. `label` names it in logs."""

    host: str
    port: int
    label: str = ""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}" if self.port else host

    @property
    def key(self) -> str:
        """Names the node inside the head, for the whole life of the process."""
        return self.label or str(self)


def parse_address(text: str) -> NodeAddress:
    """Read `[name=]host[:port]`; an IPv6 address with a port stands in brackets. Raises ConfigError."""
    label, equals, rest = text.strip().partition("=")
    if not equals:
        label, rest = "", label
    elif not label:
        raise ConfigError(f"--fleet: {text[:80]!r} has an empty name")
    host, port = rest, ""
    if rest.startswith("["):
        host, bracket, tail = rest[1:].partition("]")
        if not bracket or (tail and not tail.startswith(":")):
            raise ConfigError(f"--fleet: {rest[:80]!r} is not [address]:port")
        port = tail[1:]
    elif rest.count(":") == 1:
        host, _, port = rest.partition(":")
    if not host:
        raise ConfigError(f"--fleet: {text[:80]!r} names no host")
    if not port:
        return NodeAddress(host, PORT_DEFAULT, label)
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65_535):
        raise ConfigError(f"--fleet: {port[:20]!r} is not a port")
    return NodeAddress(host, int(port), label)


def parse_fleet(texts: str | Iterable[str]) -> tuple[NodeAddress, ...]:
    """Read `--fleet` values: comma-separated addresses, or `@FILE` with a list of them. Raises ConfigError, also for doubles."""
    values = [texts] if isinstance(texts, str) else list(texts)
    items: list[str] = []
    for item in (item.strip() for value in values for item in value.split(",") if item.strip()):
        items += read_nodes(Path(item[1:])) if item.startswith("@") else [item]
    if len(items) > NODES_MAX:
        raise ConfigError(f"--fleet: more than {NODES_MAX} nodes")
    found: dict[str, NodeAddress] = {}
    places: set[tuple[str, int]] = set()
    for item in items:
        address = parse_address(item)
        if address.key in found or (address.host, address.port) in places:
            raise ConfigError(f"--fleet: {address.key} is named twice")
        found[address.key] = address
        places.add((address.host, address.port))
    return tuple(found.values())


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as the fleet serves it. `window` is the largest of its nodes'; `nodes` are those that are up."""

    name: str
    window: int
    is_up: bool
    nodes: tuple[str, ...]
    weights: str = ""
    text: str = ""
    vocabulary: int = 0
    eos_ids: tuple[int, ...] = ()
    determinism: Determinism = Determinism.NONE
    lanes: int = 0


@dataclass(slots=True)
class _Serving:
    """One node's live offer of one model."""

    title: str
    offer: ModelOffer
    determinism: Determinism


@dataclass(slots=True)
class _Model:
    """`last` is how it was when a node came last, `now` how it is: told with every request, changed with every node."""

    last: ServedModel
    by_node: dict[str, _Serving]
    now: ServedModel


@dataclass(frozen=True, slots=True)
class Admission:
    """What of a WELCOME is used, and what had to be refused. No offers at all means: refuse the node."""

    offers: dict[str, ModelOffer]
    complaints: tuple[str, ...]
    tenant_lanes: int = 0

    def views(self) -> dict[str, Offer]:
        cap = self.tenant_lanes
        return {
            name: Offer(o.weights, o.window, o.lanes, o.block_tokens, o.blocks, o.engine, cap)
            for name, o in self.offers.items()
        }


class Directory:
    """Live identities and served models. Keys are the nodes' `NodeAddress.key`."""

    def __init__(
        self, *, allow_mixed: bool = False, texts: Mapping[str, str] | None = None
    ) -> None:
        self._allow_mixed = allow_mixed
        self._texts = dict(texts or {})
        self._identities: dict[str, str] = {}
        self._models: dict[str, _Model] = {}

    def expect_text(self, model: str, fingerprint: str) -> None:
        """From now on nodes must offer `model` with this tokenizer and template."""
        self._texts[model] = fingerprint

    def admit(self, key: str, title: str, welcome: Welcome) -> Admission:
        """Take a node in, or say by name why it or one of its models is refused."""
        other = self._identities.get(welcome.node)
        if other is not None and other != key:
            double = f"it calls itself '{welcome.node}', which is live at {other} already"
            return Admission({}, (double,))
        offers: dict[str, ModelOffer] = {}
        complaints: list[str] = []
        for offer in welcome.models:
            complaint = self._complaint(key, offer)
            if complaint is None:
                offers[offer.name] = offer
            else:
                complaints.append(complaint)
        if not offers:
            return Admission({}, tuple(complaints) or ("it serves no model",))
        self._identities[welcome.node] = key
        for offer in offers.values():
            self._serve(key, _Serving(title, offer, welcome.determinism))
        return Admission(offers, tuple(complaints), tenant_lanes_of(welcome.features))

    def leave(self, key: str) -> None:
        """Forget a node's live part; its models stay known."""
        self._identities = {name: k for name, k in self._identities.items() if k != key}
        for model in self._models.values():
            model.by_node.pop(key, None)
            model.now = _current(model)

    def knows(self, model: str) -> bool:
        return model in self._models

    def models(self) -> list[ServedModel]:
        return [model.now for model in self._models.values()]

    def model(self, name: str) -> ServedModel | None:
        model = self._models.get(name)
        return None if model is None else model.now

    def _complaint(self, key: str, offer: ModelOffer) -> str | None:
        expected = self._texts.get(offer.name)
        if expected is not None and offer.text != expected:
            return (
                f"its tokenizer or template of '{offer.name}' differs "
                f"(text fingerprint {offer.text}, ours {expected})"
            )
        model = self._models.get(offer.name)
        if model is None:
            return None
        for other, serving in model.by_node.items():
            known = serving.offer
            if other == key:
                continue
            if known.text != offer.text or known.vocabulary != offer.vocabulary:
                return f"its tokenizer or template of '{offer.name}' differs from {serving.title}'s"
            if known.weights != offer.weights and not self._allow_mixed:
                return (
                    f"it serves other weights as '{offer.name}' ({offer.weights}, "
                    f"{serving.title} has {known.weights}); --allow-mixed permits that"
                )
        return None

    def _serve(self, key: str, serving: _Serving) -> None:
        offer = serving.offer
        model = self._models.get(offer.name)
        if model is None:
            last = ServedModel(offer.name, offer.window, True, (serving.title,))
            model = self._models[offer.name] = _Model(last, {}, last)
        model.by_node[key] = serving
        model.last = model.now = _current(model)


def _current(model: _Model) -> ServedModel:
    """Describe a model by its live nodes, or, if none is left, as it last was."""
    live = list(model.by_node.values())
    last = model.last
    if not live:
        return ServedModel(
            last.name, last.window, False, (), last.weights, last.text,
            last.vocabulary, last.eos_ids, last.determinism, 0,
        )  # fmt: skip
    first = live[0].offer
    levels = {serving.determinism for serving in live}
    return ServedModel(
        name=last.name,
        window=max(serving.offer.window for serving in live),
        is_up=True,
        nodes=tuple(serving.title for serving in live),
        weights=first.weights,
        text=first.text,
        vocabulary=first.vocabulary,
        eos_ids=first.eos_ids,
        determinism=levels.pop() if len(levels) == 1 else Determinism.NONE,
        lanes=sum(serving.offer.lanes for serving in live),
    )
