"""What the cases share with the tests of the routes."""

from tests.unit.head_api.conftest import make_bench

__all__ = ["make_bench"]
