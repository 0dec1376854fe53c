"""Requests drawn from an OpenAPI document of the routes, valid and wrong ones: the odd half of the routes."""

from __future__ import annotations

import pytest

from tests.unit.head_api.openapi_part import judge_part


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_drawn_request_makes_the_head_fail() -> None:
    judge_part("1/2")
