"""ruff and mypy accept all our code, tests included."""

import sys
from pathlib import Path

import pytest

from tests.guards.repository import SOURCE_ROOTS, must_pass

CHECKS = [
    pytest.param(["ruff", "check"], id="ruff-check"),
    pytest.param(["ruff", "format", "--check"], id="ruff-format"),
    pytest.param(["mypy", *SOURCE_ROOTS, "tests"], id="mypy-strict"),
]


@pytest.mark.parametrize("command", CHECKS)
def test_code_is_clean(command: list[str]) -> None:
    tool, *arguments = command
    must_pass(Path(sys.executable).with_name(tool), *arguments)
