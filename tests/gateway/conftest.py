"""Makes `tests.gateway.fakes` importable and gives the tests a gateway with fake workers."""

import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest_asyncio

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.gateway.fakes import Stage


@pytest_asyncio.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        yield Stage(tmp_path, stack)
