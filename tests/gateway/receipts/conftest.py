"""Gives the tests a real PostgreSQL, one for all of them, and a ledger in either database."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.receipts.postgres import Postgres, postgres


@pytest.fixture(scope="session")
def server() -> Iterator[Postgres]:
    with postgres() as started:
        yield started


@pytest.fixture(params=["sqlite", "postgresql"])
def ledger_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty ledger's address."""
    if request.param == "sqlite":
        return str(tmp_path / "receipts.db")
    started: Postgres = request.getfixturevalue("server")
    return started.new_database()
