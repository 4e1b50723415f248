"""The layout: a closed top level, source roots that are no packages, functions of a screen."""

import ast
from pathlib import Path

import pytest

from tests.guards.repository import ROOT, SOURCE_ROOTS, files, modules

TOP_LEVEL = {
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "uv.lock",
    "operator",
    "gateway",
    "worker",
    "kernels",
    "charts",
    "tests",
}
FUNCTION_LINES = {"operator": 60, "gateway": 60, "worker": 60, "kernels": 100}
MODULE_LINES = 400
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def test_top_level_is_closed() -> None:
    found = {path.parts[0] for path in files()}

    # charts is there once the chart is: git keeps no empty folder.
    assert {name for name in found if not name.startswith(".")} | {"charts"} == TOP_LEVEL


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_source_root_is_no_package(root: str) -> None:
    # operator/__init__.py would shadow the standard library's operator.
    assert Path(root, "__init__.py") not in files()


def test_tests_have_no_packages_but_the_cluster_that_runs_as_a_module() -> None:
    found = {path.parent for path in files() if path.match("tests/**/__init__.py")}

    assert found - {Path("tests/cluster")} == set()


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_each_folder_of_a_source_root_is_a_package(root: str) -> None:
    folders = {path.parent for path in files() if path.suffix == ".py" and path.parts[0] == root}

    # hatchling ships them all the same, but mypy and import-linter pass a namespace over.
    assert {folder for folder in folders if folder / "__init__.py" not in files()} == set()


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_functions_are_short(root: str) -> None:
    lengths = [
        (node.end_lineno - node.lineno + 1, f"{path}:{node.lineno} {node.name}")
        for path, tree in modules(root)
        for node in ast.walk(tree)
        if isinstance(node, FUNCTION) and node.end_lineno is not None
    ]

    too_long = sorted((n, where) for n, where in lengths if n > FUNCTION_LINES[root])
    assert too_long == [], "\n".join(f"{n} lines: {where}" for n, where in reversed(too_long))


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_modules_are_short(root: str) -> None:
    lengths = [
        (len((ROOT / path).read_text().splitlines()), str(path))
        for path in files()
        if path.suffix == ".py" and path.parts[0] == root
    ]

    too_long = sorted((n, where) for n, where in lengths if n > MODULE_LINES)
    assert too_long == [], "\n".join(f"{n} lines: {where}" for n, where in reversed(too_long))
