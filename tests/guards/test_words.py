"""What no file of ours says: a machine's own places, idle TODOs, sleeps and silent skips."""

import ast
import re
from typing import TypeGuard

import pytest

from tests.guards.repository import modules, texts

# Written so that the patterns do not match themselves.
PLACES = re.compile(r"/wor[k]/(main|shared)|[.][.]/share[d]\b|[.]librar[y]/|/opt/wheel[s]")
IDLE_TODO = re.compile(r"\bTOD[O]\b(?!\([^)]+\):)|\bFIXM[E]\b|\bXX[X]\b")
PUBLIC_HOSTS = {"pypi.org", "files.pythonhosted.org", "registry.npmjs.org", "proxy.golang.org"}
LOCK_FILES = {"uv.lock", "package-lock.json", "pylock.toml"}
MARKS_WITH_REASON = {"skip", "skipif", "xfail"}
CALLS_WITH_REASON = {"skip", "xfail", "importorskip"}


def lines(pattern: re.Pattern[str]) -> list[str]:
    """Each line of a text file that `pattern` is found in, with its place."""
    return [
        f"{path}:{number}: {line.strip()}"
        for path, text in texts()
        if path.name not in LOCK_FILES and pattern.search(text)
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


def test_no_file_names_a_place_of_one_machine() -> None:
    assert lines(PLACES) == []


def test_each_todo_names_its_trigger() -> None:
    assert lines(IDLE_TODO) == []


def test_lock_files_name_public_registries_only() -> None:
    hosts = {
        host
        for path, text in texts()
        if path.name in LOCK_FILES
        for host in re.findall(r'"https?://([^/"]+)', text)
    }

    assert hosts - PUBLIC_HOSTS == set()


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an attribute chain, else the empty string."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            return f"{dotted(value)}.{attr}"
        case _:
            return ""


def sleeps(tree: ast.AST) -> list[int]:
    """Lines that sleep for real outside a polling loop, or import what does."""
    polls = {
        id(node)
        for loop in ast.walk(tree)
        if isinstance(loop, ast.While)
        for node in ast.walk(loop)
    }
    return [
        node.lineno
        for node in ast.walk(tree)
        if (_is_sleep(node) and id(node) not in polls)
        or (isinstance(node, ast.ImportFrom) and node.module == "time" and _imports_sleep(node))
    ]


def _is_sleep(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and dotted(node.func) == "time.sleep"


def _imports_sleep(node: ast.ImportFrom) -> bool:
    return any(alias.name == "sleep" for alias in node.names)


def silent(tree: ast.AST) -> list[int]:
    """Lines that skip or expect a failure without saying why, or run a test again."""
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        name = dotted(node)
        call = called.get(id(node))
        has_keyword = call is not None and any(word.arg == "reason" for word in call.keywords)
        has_text = call is not None and bool(call.args)
        if name == "pytest.mark.flaky":
            found.append(node.lineno)
        if name in {f"pytest.mark.{mark}" for mark in MARKS_WITH_REASON} and not has_keyword:
            found.append(node.lineno)
        if name in {f"pytest.{function}" for function in CALLS_WITH_REASON}:
            by_position = has_text and not name.endswith("importorskip")
            if not has_keyword and not by_position:
                found.append(node.lineno)
    return found


def test_no_test_sleeps() -> None:
    # Wait for the condition instead: a sleep is too short on one machine and wasted on the other.
    found = [f"{path}:{line}" for path, tree in modules("tests") for line in sleeps(tree)]

    assert found == []


def test_each_skip_and_xfail_says_why() -> None:
    found = [f"{path}:{line}" for path, tree in modules("tests") for line in silent(tree)]

    assert found == []


PLANTED = [
    pytest.param("import time\ntime.sleep(1)", sleeps, id="sleep"),
    pytest.param("from time import sleep", sleeps, id="imported-sleep"),
    pytest.param("@pytest.mark.skip\ndef test(): ...", silent, id="bare-skip"),
    pytest.param("@pytest.mark.skipif(True)\ndef test(): ...", silent, id="skipif"),
    pytest.param("@pytest.mark.xfail(strict=True)\ndef test(): ...", silent, id="xfail"),
    pytest.param("pytest.skip()", silent, id="skip-call"),
    pytest.param("pytest.importorskip('torch')", silent, id="importorskip"),
    pytest.param("@pytest.mark.flaky(reruns=3)\ndef test(): ...", silent, id="rerun"),
]


@pytest.mark.parametrize(("source", "guard"), PLANTED)
def test_guard_sees_a_planted_offence(source: str, guard: object) -> None:
    assert callable(guard)
    assert guard(ast.parse(source)) != []


def test_sleep_between_two_looks_passes() -> None:
    assert sleeps(ast.parse("while not ready():\n    time.sleep(0.02)")) == []


@pytest.mark.parametrize(
    "line", ["cd /wor" + "k/main", ".." + "/shared/design", "TO" + "DO: later", "FIX" + "ME"]
)
def test_patterns_see_a_planted_line(line: str) -> None:
    assert PLACES.search(line) or IDLE_TODO.search(line)


def test_todo_with_a_trigger_passes() -> None:
    assert not IDLE_TODO.search("# TO" + "DO(vllm 0.27): drop the second path")
