"""Requests drawn from an OpenAPI document of every route, valid ones and wrong ones: no answer is a failure of the head.

    python -m tests.unit.head_api.soak_openapi [--cases 1000] [--brief] [--part 1/2]        # needs schemathesis: see tests/fuzz.txt

`--brief` draws the same requests every time, with at most two items a list, which is most of what drawing costs: tests/cases has it.
The document is made here from the table of routes and the models of their bodies; a route that takes a body and has no model here is an
error. What is sent runs against the bench's head. Bars: no 5xx but 503, every error in the shape of its dialect, the good request
after each route is served.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import time
from typing import Any, cast

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from pydantic import BaseModel
from schemathesis.generation import GenerationMode

from superfluid_head.app import routes
from tests.docs.api_reference import BODIES
from tests.unit.head_api.conftest import Bench, chat_body

ENDLESS = {"/v1/fleet/events"}
ITEMS_MAX = 2


def document(bench: Bench) -> dict[str, Any]:
    paths: dict[str, Any] = {}
    known: dict[str, Any] = {}
    for verbs, routed, _ in routes(bench.head):
        path = routed.replace(":path", "")
        for verb in verbs:
            if verb == "HEAD" or path in ENDLESS:
                continue
            operation: dict[str, Any] = {"responses": {"default": {"description": "any"}}}
            operation["parameters"] = [
                {
                    "name": name,
                    "in": "path",
                    "required": True,
                    "schema": {"type": "string", "minLength": 1},
                }
                for name in re.findall(r"\{(\w+)\}", path)
            ]
            if verb == "POST":
                operation["requestBody"] = _body(BODIES[path], known)
            paths.setdefault(path, {})[verb.lower()] = operation
    info = {"title": "superfluid", "version": "1"}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": known}}


def _body(model: type[BaseModel] | None, known: dict[str, Any]) -> dict[str, Any]:
    shape: dict[str, Any] = {"type": "object"}
    if model is not None:
        template = f"#/components/schemas/{model.__name__}.{{model}}"
        shape = model.model_json_schema(ref_template=template)
        for name, part in shape.pop("$defs", {}).items():
            known[f"{model.__name__}.{name}"] = part
        shape["properties"]["model"] = {"enum": ["org/m", "other"]}
    return {"required": True, "content": {"application/json": {"schema": shape}}}


def fault(reply: httpx.Response) -> str | None:
    """What is wrong with an answer."""
    if reply.status_code >= 500 and reply.status_code != 503:
        return f"status {reply.status_code}"
    if reply.status_code < 400 or not reply.content:
        return None
    error = reply.json().get("error")
    words = error.get("message") if isinstance(error, dict) else error
    return None if isinstance(words, str) and words else f"shape of {reply.text[:200]}"


def shorten(part: Any) -> None:
    """Bound every list in a document."""
    if isinstance(part, dict):
        if part.get("type") == "array":
            part["maxItems"] = min(ITEMS_MAX, part.get("maxItems", ITEMS_MAX))
        part = list(part.values())
    if isinstance(part, list):
        for each in part:
            shorten(each)


def judge(
    bench: Bench, operation: Any, cases: int, *, is_brief: bool = False
) -> tuple[int, list[str]]:
    """Send so many requests to one operation; return how many were sent and what was wrong."""
    sent, faults = 0, []
    phases = (Phase.generate,) if is_brief else tuple(Phase)

    async def send(case: Any) -> httpx.Response:
        parts: dict[str, Any] = {}
        if isinstance(case.body, dict | list | str | int | float | bool | None):
            parts["json"] = case.body
        path = case.formatted_path
        async with asyncio.timeout(20):
            return await bench.asend(case.method, path, **parts)

    modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
    if not list(operation.body):  # any path is a valid one
        modes.pop()
    for mode in modes:
        try:
            strategy = operation.as_strategy(generation_mode=mode)
        except schemathesis.errors.InvalidSchema:
            continue

        @settings(
            max_examples=-(-cases // len(modes)),
            deadline=None,
            database=None,
            derandomize=is_brief,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=strategy)
        def run(case: Any) -> None:
            nonlocal sent
            sent += 1
            try:
                wrong = fault(asyncio.run(send(case)))
            except (ValueError, httpx.InvalidURL):
                return  # what no client could send
            if wrong is not None:
                faults.append(
                    f"{case.method} {case.formatted_path} {str(case.body)[:300]}: {wrong}"
                )

        with contextlib.suppress(
            Unsatisfiable
        ):  # where nothing can be sent there is nothing wrong to send
            run()
    return sent, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1_000)
    parser.add_argument("--brief", action="store_true")
    parser.add_argument("--part", default="1/1", help="every so manieth operation, from which on")
    options = parser.parse_args()
    first, step = map(int, options.part.split("/"))
    bench = Bench()
    made = document(bench)
    if options.brief:
        shorten(made)
    schema = schemathesis.openapi.from_dict(made)
    every, began = [], time.process_time()
    for found in list(schema.get_all_operations())[first - 1 :: step]:
        operation = cast("Any", found).ok()
        sent, faults = judge(bench, operation, options.cases, is_brief=options.brief)
        good = bench.send("POST", "/v1/chat/completions", json=chat_body(max_tokens=2))
        faults += [] if good.status_code == 200 else [f"the next good request: {good.text[:200]}"]
        print(
            f"  {operation.method.upper():6} {operation.path:40} {sent:6} sent, {len(faults)} wrong"
        )
        every += faults
    bench.workers.close()
    print(*every[:40], sep="\n")
    print(f"{len(every)} wrong answers, {time.process_time() - began:.0f} s of CPU")
    return 1 if every else 0


if __name__ == "__main__":
    raise SystemExit(main())
