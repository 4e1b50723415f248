"""Decides which failures local mode knows, and the exit codes they end with."""

import sys

OK = 0
NO = 1
WRONG_USE = 2
INTERRUPTED = 130


class LocalError(Exception):
    """The answer is no: shown to the user without a traceback. The message says what to do."""

    exit_code = NO


class WrongUse(LocalError):
    """The command line or the manifest is wrong."""

    exit_code = WRONG_USE


class PortTaken(LocalError):
    """The gateway's port belongs to someone else."""


def refuse(error: LocalError) -> int:
    """Say `error` to the user; the exit code of the command."""
    sys.stderr.write(f"isobatch: {error}\n")
    return error.exit_code
