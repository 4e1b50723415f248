"""Performs the program `isobatch`: finds the command asked for and runs it, and nothing else.

A command is an entry point of the group `isobatch.commands`, `fn(argv) -> exit code`; only the one
asked for is imported. Exit codes: 0 ok, 1 the answer is no, 2 wrong use.
"""

import os
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points, version

from isobatch_cli.catalog import help_text, missing_module, unknown_command
from isobatch_cli.lifetime import honour_environment

GROUP = "isobatch.commands"
INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
PIPE_CLOSED = 141  # 128 + SIGPIPE


def main() -> int:
    """Run the command that `sys.argv` asks for and return its exit code."""
    return run_quietly(lambda: dispatch(sys.argv[1:]))


def run_quietly(command: Callable[[], int]) -> int:
    """Run `command` as a program: tied to its parent if asked, no traceback for a Ctrl-C."""
    try:
        honour_environment(os.environ)
        code = command()
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader left, as `head` does. Python flushes again at exit: give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    return code


def dispatch(argv: list[str]) -> int:
    """Run one command line, without the program's name."""
    commands = {point.name: point for point in entry_points(group=GROUP)}
    match argv:
        case []:
            sys.stderr.write(help_text(version("isobatch"), commands))
            return 2
        case ["-h" | "--help" | "help"]:
            sys.stdout.write(help_text(version("isobatch"), commands))
            return 0
        case ["--version" | "-V"]:
            sys.stdout.write(f"isobatch {version('isobatch')}\n")
            return 0
        case ["help", name, *_] if name in commands:
            return _run(commands[name], ["--help"])
        case [name, *rest] if name in commands:
            return _run(commands[name], rest)
        case [name, *_]:
            asked = argv[1] if name == "help" else name
            sys.stderr.write(unknown_command(asked, commands))
            return 2
    raise AssertionError(argv)


def _run(point: EntryPoint, argv: list[str]) -> int:
    try:
        command = point.load()
    except ModuleNotFoundError as exc:
        component = point.module.partition(".")[0]
        sys.stderr.write(missing_module(point.name, component, exc.name or str(exc)))
        return 2
    code: int = command(argv)
    return code
