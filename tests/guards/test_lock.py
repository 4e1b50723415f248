"""The lock is the one that pyproject.toml asks for."""

from tests.guards.repository import must_pass, uv


def test_lock_is_current() -> None:
    must_pass(uv(), "lock", "--check")
