"""The mock engine says truthfully how much KV it would move, so that parking can be tried without an accelerator."""

from __future__ import annotations

import pytest

from superfluid_core.clock import SystemClock
from superfluid_core.errors import ConfigError
from superfluid_core.kv.blocks import PoolShape
from superfluid_noded.build import build_engine, find_models, scheduler_sizes
from superfluid_noded.config import Surroundings, build_config, read_settings


def pool_of(**flags: object) -> PoolShape:
    given = {"model": "demo", **flags}
    config = build_config(read_settings(given, None), Surroundings(None, None, None, None))
    (model,) = find_models(config)
    built = build_engine(config, model, SystemClock())
    built.engine.close()
    _, rules, pool = scheduler_sizes(config, built.info)
    assert rules.park
    return pool


def test_a_mock_node_parks_as_much_as_its_model_has_unless_told_otherwise() -> None:
    plain = pool_of(engine="mock", park=True)
    # SmolLM2-135M: 30 layers, 3 KV heads of 64, key and value, 16 bits
    assert plain.kv_bytes_per_token == 30 * 3 * 64 * 2 * 2
    assert plain.host_copy_bytes_per_s > 0
    assert pool_of(engine="mock", park=True, mock_kv_bytes="500").kv_bytes_per_token == 500


def test_the_figure_belongs_to_the_mock_engine() -> None:
    with pytest.raises(ConfigError, match="--mock-kv-bytes belongs to --engine mock"):
        pool_of(engine="native", mock_kv_bytes="500")
