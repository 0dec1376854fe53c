"""What nodes measure, through the head, for admins: one node's figures as they are, and all of them side by side.

A node that does not answer is in the answer with its cause; it never makes the others wait longer than their own answers.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from superfluid_core.errors import InvalidRequestError, SuperfluidError
from superfluid_core.session import QosClass
from superfluid_head.api.errors import ApiError, from_error, require_admin
from superfluid_head.api.state import Head

SUMMED = (
    *("lanes", "lanes_busy", "lanes_prefilling", "lanes_decoding", "queued_tokens"),
    *("blocks", "blocks_used", "blocks_cached", "accepted", "rejected", "preemptions"),
    *(
        "prompt_tokens",
        "output_tokens",
        "recomputed_tokens",
        "prefix_hit_tokens",
        "prefix_miss_tokens",
    ),
)


class NodesEndpoint:
    """The routes' handlers."""

    def __init__(self, head: Head) -> None:
        self._head = head

    async def stats(self, request: Request) -> Response:
        """Show one node's scheduler from within (admins)."""
        require_admin(request.scope["state"]["principal"])
        try:
            data = await self._head.fleet.node_stats(request.path_params["node"])
        except InvalidRequestError:
            raise ApiError(404, "no such node", code="node_not_found") from None
        return Response(data, media_type="application/json")

    async def every(self, request: Request) -> Response:
        """Sum what the schedulers of all nodes measure, and show each (admins)."""
        require_admin(request.scope["state"]["principal"])
        names = [node.name for node in self._head.fleet.health().nodes]
        async with asyncio.TaskGroup() as group:
            asked = {name: group.create_task(self._figures(name)) for name in names}
        found = {name: task.result() for name, task in asked.items()}
        waiting = dict(zip(_labels(), self._head.fleet.waiting_by_class(), strict=True))
        return JSONResponse(
            {"head": {"waiting": waiting}, "total": _total(found.values()), "nodes": found}
        )

    async def _figures(self, name: str) -> Any:
        try:
            return json.loads(await self._head.fleet.node_stats(name))
        except SuperfluidError as error:
            return {"error": from_error(error).body()["error"]}
        except ValueError:
            return {"error": {"message": "the node's figures are no JSON"}}


def _labels() -> list[str]:
    return [qos.label for qos in QosClass]


def _total(every: Any) -> dict[str, Any]:
    """Sum what can be summed over the nodes that answered."""
    known = [figures["scheduler"] for figures in every if "scheduler" in figures]
    total: dict[str, Any] = {name: sum(each.get(name, 0) for each in known) for name in SUMMED}
    total["queued"] = {
        label: sum(each.get("queued", {}).get(label, 0) for each in known) for label in _labels()
    }
    return total
