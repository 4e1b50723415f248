"""The program `isobatch`: what it says and returns, by its own command line."""

import os
import subprocess
import sys

import pytest
from isobatch_cli.catalog import missing_module

PROGRAM = [sys.executable, "-m", "isobatch_cli"]


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *argv], check=False, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["help"]])
def test_help_lists_the_commands_with_a_line_each_and_an_example(argv: list[str]) -> None:
    done = run(*argv)

    assert done.returncode == 0
    for command in ("up", "status", "logs", "down", "worker", "gateway", "certify", "numerics"):
        [line] = [text for text in done.stdout.splitlines() if text.split()[:1] == [command]]
        assert len(line.split()) > 3
    assert "isobatch up -f service.yaml" in done.stdout
    assert done.stderr == ""


def test_help_of_a_command_has_examples() -> None:
    done = run("help", "up")

    assert done.returncode == 0
    assert "examples:\n  isobatch up" in done.stdout


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        pytest.param(["statsu"], "did you mean `isobatch status`?", id="close to one"),
        pytest.param(["frobnicate"], "`isobatch --help` lists them", id="close to none"),
        pytest.param(["help", "dwn"], "did you mean `isobatch down`?", id="after help"),
        pytest.param([], "usage: isobatch COMMAND", id="none at all"),
    ],
)
def test_wrong_use_is_said_on_stderr_with_code_2(argv: list[str], expected: str) -> None:
    done = run(*argv)

    assert done.returncode == 2
    assert expected in done.stderr
    assert done.stdout == ""


def test_version() -> None:
    done = run("--version")

    assert done.returncode == 0
    assert done.stdout.startswith("isobatch 0.")


@pytest.mark.parametrize(
    ("component", "module", "expected"),
    [
        ("isobatch_worker", "torch", "pip install 'isobatch[worker]'"),
        ("isobatch_gateway", "fastapi.app", "pip install 'isobatch[gateway]'"),
        ("isobatch_operator", "psutil", "pip install 'isobatch[operator]'"),
        ("third_party", "foo", "pip install foo"),
        ("isobatch_worker", "isobatch_worker.x", "install isobatch again"),
    ],
)
def test_a_missing_extra_is_named(component: str, module: str, expected: str) -> None:
    assert expected in missing_module("cmd", component, module)


def test_a_command_without_its_extra_says_what_to_install() -> None:
    script = (
        "import sys; sys.modules['psutil'] = None; sys.argv = ['isobatch', 'status'];"
        "from isobatch_cli.main import main; sys.exit(main())"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )

    assert done.returncode == 2
    assert "pip install 'isobatch[operator]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_help_imports_no_component() -> None:
    script = (
        "import sys; sys.argv = ['isobatch', '--help'];"
        "from isobatch_cli.main import main; main();"
        "print([m for m in sys.modules if m.split('.')[0] in"
        " ('isobatch_operator', 'isobatch_gateway', 'isobatch_worker', 'torch', 'httpx')])"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )

    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("error", "code"), [("KeyboardInterrupt", 130), ("BrokenPipeError", 141)], ids=["^C", "pipe"]
)
def test_an_interrupt_and_a_closed_pipe_end_quietly(error: str, code: int) -> None:
    script = (
        "import sys; from isobatch_cli.main import run_quietly\n"
        f"def command(): raise {error}\n"
        "sys.exit(run_quietly(command))"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )

    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_a_reader_that_leaves_causes_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)

    done = subprocess.run(
        [*PROGRAM, "--help"], check=False, stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)

    assert done.returncode == 141
    assert done.stderr == ""
