"""The repository as git sees it: what is tracked, and what a commit would add."""

import ast
import os
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE_ROOTS = ("operator", "gateway", "worker", "kernels")


@cache
def files() -> tuple[Path, ...]:
    """Tracked and not ignored files, relative to the root."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    names = {Path(name) for name in listing.stdout.split("\0") if name}
    return tuple(sorted(name for name in names if (ROOT / name).is_file()))


def texts() -> list[tuple[Path, str]]:
    """Every file that is text, with its text."""
    found = []
    for path in files():
        try:
            found.append((path, (ROOT / path).read_text()))
        except UnicodeDecodeError:
            continue  # a picture or a model file
    return found


def modules(*roots: str) -> list[tuple[Path, ast.Module]]:
    """Every Python file below `roots`, parsed."""
    return [
        (path, ast.parse((ROOT / path).read_text(), filename=str(path)))
        for path in files()
        if path.suffix == ".py" and path.parts[0] in roots
    ]


def must_pass(*command: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> None:
    """Run `command` to its end; the test fails with its whole output if it does."""
    ran = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        pytest.fail(f"{ran.stdout}{ran.stderr}", pytrace=False)


def uv() -> str:
    """The uv that runs us, or the one on the path."""
    found = os.environ.get("UV") or shutil.which("uv")
    assert found is not None, "uv is not on the path: pip install uv"
    return found
