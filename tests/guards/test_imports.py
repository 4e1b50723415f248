"""Who may import whom, and that each extra is enough for its part without torch."""

import os
import sys
from pathlib import Path

import pytest

from tests.guards.repository import must_pass, uv

# Run by the fresh environment's own Python, away from the checkout.
IMPORT_ALL = """
import importlib, importlib.util, pkgutil, sys

for name in sys.argv[1:]:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
unwanted = [n for n in ("torch", "triton", "vllm") if importlib.util.find_spec(n) is not None]
sys.exit(f"installed, but must not be: {unwanted}" if unwanted else 0)
"""

BASE = ("isobatch_contracts", "isobatch_cli")
ENVIRONMENTS = [
    pytest.param((), BASE, id="base"),
    pytest.param(("gateway",), (*BASE, "isobatch_gateway"), id="gateway"),
    pytest.param(("operator",), (*BASE, "isobatch_operator"), id="operator"),
]


def test_import_contracts_hold() -> None:
    must_pass(Path(sys.executable).with_name("lint-imports"), "--no-cache")


@pytest.mark.parametrize(("extras", "packages"), ENVIRONMENTS)
def test_fresh_environment_imports_every_module_of_its_part(
    extras: tuple[str, ...], packages: tuple[str, ...], tmp_path: Path
) -> None:
    # Not editable, and built anew: what is imported is the wheel's content.
    options = ["--frozen", "--no-default-groups", "--no-editable", "--reinstall-package=isobatch"]
    named = [f"--extra={extra}" for extra in extras]
    must_pass(uv(), "sync", *options, *named, env=_environment(tmp_path / "venv"))

    python = tmp_path / "venv/bin/python"
    must_pass(python, "-I", "-W", "error", "-c", IMPORT_ALL, *packages, cwd=tmp_path)


def _environment(venv: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    return kept | {"UV_PROJECT_ENVIRONMENT": str(venv), "UV_PYTHON": sys.executable}
