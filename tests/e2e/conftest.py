"""Real processes on loopback for the end-to-end tests: small fleets of the simulated engine, and the official client.

Everything is started through the bench's rig, which ends its children by their ids. The clients ignore proxies.
"""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from superfluid_head.bench.rig import Rig
from superfluid_head.bench.small_fleet import SmallFleet

PLAIN = ("--engine", "mock", "--model", "demo")
MOCK = (*PLAIN, "--mock-eos", "0")
FAST = (*PLAIN, "--mock-rates", "prefill=20000,decode=400", "--mock-eos", "0.05")


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig() as made:
        yield made


@pytest.fixture(scope="session")
def fleet() -> Iterator[SmallFleet]:
    """Two fast nodes behind a head, shared by the tests that break nothing."""
    with Rig() as made:
        yield SmallFleet(made, FAST, "demo")


@pytest.fixture
def client(fleet: SmallFleet) -> Iterator[openai.OpenAI]:
    http = openai.DefaultHttpxClient(trust_env=False, timeout=50)
    with openai.OpenAI(
        base_url=f"{fleet.url}/v1", api_key="none", http_client=http, max_retries=0
    ) as made:
        yield made
