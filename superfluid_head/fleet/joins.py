"""Nodes that dial in: `--fleet-listen`. The head's listener, and whom each link belongs to.

TLS roles stay as they are: the node is the server, whoever dialled. A node that joins is known by its identity; its further links
(for bandwidth, or to replace a worn one) come from the same process at the same address. Another address or another process under
an identity that is live is refused by name, on both sides' logs, until the first one is lost. A node that has been gone for
`joined_forget_ms` is forgotten. What a link then carries is the node's business.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from superfluid_core.clock import MS, Clock
from superfluid_core.errors import ErrorCode, SuperfluidError
from superfluid_core.limits import LinkLimits
from superfluid_core.link.addresses import format_address, parse_address
from superfluid_core.link.link import Link, LinkClosedError
from superfluid_core.link.listen import Listener
from superfluid_core.link.shake import HeadShake
from superfluid_core.link.tls import client_context
from superfluid_core.logs import log
from superfluid_core.wire.messages import MINOR, Hello, LinkError, Refuse, Welcome
from superfluid_head.fleet.context import FleetOptions
from superfluid_head.fleet.directory import NodeAddress
from superfluid_head.fleet.node import FEATURES, REPORTS, FleetNode
from superfluid_head.fleet.nodestate import JOINED

logger = logging.getLogger(__name__)

CONNS_FEATURE = "conns-"


class Joins:
    """Owner of the listener. `adopt` makes a node and adds it to the fleet."""

    def __init__(
        self,
        options: FleetOptions,
        clock: Clock,
        nodes: Mapping[str, FleetNode],
        adopt: Callable[[NodeAddress], FleetNode],
    ) -> None:
        self._options = options
        self._limits: LinkLimits = options.link_limits
        self._nodes = nodes
        self._adopt = adopt
        keys = options.keys
        context = None if keys is None else client_context(keys, options.head)
        features = (REPORTS, *FEATURES, f"{CONNS_FEATURE}{options.conns}")
        self._listener = Listener(
            self._handle,
            _never_asked,
            keys,
            options.head,
            self._limits,
            clock,
            instead=HeadShake(context, Hello(MINOR, features, options.head)),
        )

    @property
    def refusals(self) -> int:
        """Count what did not come to WELCOME."""
        return self._listener.refusals

    async def start(self) -> list[tuple[str, int]]:
        """Bind every address. Raises SuperfluidError."""
        bound: list[tuple[str, int]] = []
        for host, port in self._options.listen:
            try:
                bound += await self._listener.start(host, port)
            except OSError as error:
                where = format_address(host, port)
                text = f"cannot listen for nodes on {where}: {error.strerror or 'no such name'}"
                raise SuperfluidError(text) from None
        return bound

    async def serve(self) -> None:
        """Let nodes in until cancelled."""
        try:
            await self._listener.serve()
        finally:
            await self._listener.close("the head stops")

    def forgotten(self, now_ns: int) -> list[FleetNode]:
        """Name the nodes that joined once and have been gone for long."""
        longest_ns = self._limits.joined_forget_ms * MS
        return [
            node
            for node in self._nodes.values()
            if node.is_joined and not node.is_linked and now_ns - node.down_ns >= longest_ns
        ]

    async def _handle(self, link: Link) -> None:
        welcome = link.peer
        assert isinstance(welcome, Welcome), "a head's peer says WELCOME"
        host = parse_address(link.remote, 0)[0]
        refusal = self._refusal(welcome, host)
        if not refusal:
            await self._node_of(welcome.node, host).join(link)
            return
        self._listener.refuse(link.remote, refusal, host)
        try:
            link.send(LinkError(ErrorCode.UNAUTHORIZED, f"refused: {refusal}"))
        except LinkClosedError:
            return
        await link.close(refusal)

    def _refusal(self, welcome: Welcome, host: str) -> str:
        """Say why this node may not join now, if it may not."""
        name = f"it calls itself '{welcome.node}', which is live"
        for each in self._nodes.values():
            if each.is_linked and not each.is_joined and each.identity == welcome.node:
                return f"{name} at {each.address} already"
        node = self._nodes.get(JOINED + welcome.node)
        if node is None:
            joined = sum(each.is_joined for each in self._nodes.values())
            full = joined >= self._limits.joined_nodes_max
            return f"{joined} nodes have joined; that is the most" if full else ""
        standing = node.standing
        if standing is None:
            return ""
        if node.address.host != host:
            return f"{name} at {node.address.host} already"
        if standing.welcome.boot != welcome.boot:
            return f"{name} as another process at that address"
        return ""

    def _node_of(self, identity: str, host: str) -> FleetNode:
        address = NodeAddress(host, 0, identity)
        node = self._nodes.get(JOINED + identity)
        if node is None:
            node = self._adopt(address)
            log(logger, "info", "a node joined", node=identity, address=host)
        node.address = address
        return node


def _never_asked(_hello: Hello) -> Refuse:
    return Refuse(ErrorCode.PROTOCOL_ERROR, "this is a head")
