"""Members of ours that every dialect which converses takes beside its own (http_api.md 3.3): chat's body judges them, under chat's names.

A template in a request is refused on every route, whatever the dialect (decisions 26).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from superfluid_head.api.schemas.common import BodyModel, Harmless

TEMPLATE_REFUSED: dict[str, Harmless] = {"chat_template": lambda _: False}


class VendorMembers(BodyModel):
    """What a body may say that its dialect does not know."""

    seed: Any = None
    cache_salt: Any = None
    chat_template_kwargs: Any = None

    def vendor(self, kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return them for a chat body; `kwargs` is what the dialect itself tells the template, unless the caller says otherwise."""
        given = self.chat_template_kwargs
        if kwargs and (given is None or isinstance(given, dict)):
            given = {**kwargs, **(given or {})}
        return {"seed": self.seed, "cache_salt": self.cache_salt, "chat_template_kwargs": given}
