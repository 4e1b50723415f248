"""Performs the keeping of log files: opening, simple rotation, last lines.

Processes write to their file themselves, in append mode: no pipe through the supervisor, so they
do not die of a broken pipe when it is killed. A file that has grown is copied and cut in place.
"""

import re
import shutil
import time
from pathlib import Path
from typing import BinaryIO

LIMIT_BYTES = 32 * 1024 * 1024
_TAIL_BYTES = 64 * 1024
_FILES_KEPT = 32
_HEADER = "--- "
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0e-\x1f]")


def open_log(path: Path, title: str) -> BinaryIO:
    """`path` open for appending, with a line that says what begins here."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rotate_grown(path)
    file = path.open("ab", buffering=0)
    file.write(f"{_HEADER}{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {title}\n".encode())
    return file


def rotate_grown(path: Path, limit_bytes: int = LIMIT_BYTES) -> None:
    """Move the content of a file above `limit_bytes` to `NAME.1`; its writers go on undisturbed."""
    if not path.exists() or path.stat().st_size <= limit_bytes:
        return
    shutil.copyfile(path, path.with_name(path.name + ".1"))
    with path.open("r+b") as file:
        file.truncate(0)


def last_lines(path: Path, count: int) -> list[str]:
    """The last `count` lines that are not blank, without colours; none of an absent file."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    lines = _CONTROL.sub("", text).splitlines()
    return [line.rstrip() for line in lines if line.strip()][-count:]


def last_lines_of_run(path: Path, count: int) -> list[str]:
    """The same, of what the last process to open the log has written."""
    lines = last_lines(path, count)
    starts = [number for number, line in enumerate(lines) if line.startswith(_HEADER)]
    return lines[starts[-1] + 1 :] if starts else lines


def prune(folder: Path) -> None:
    """Remove the oldest logs: every revision of a service writes files of its own."""
    files = sorted(folder.glob("*.log*"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in files[_FILES_KEPT:]:
        path.unlink(missing_ok=True)
