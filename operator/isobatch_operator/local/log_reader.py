"""Performs `isobatch logs`: finds the files of a pool, prints them, follows them."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, TextIO

from isobatch_operator.local.directory import StateDirectory
from isobatch_operator.local.errors import LocalError
from isobatch_operator.local.log_files import last_lines

_POLL_SECONDS = 0.2


def log_paths(directory: StateDirectory, pool: str, replica: int | None) -> list[Path]:
    """The logs of `pool` (or of gateway or up), one a replica: the newest revision of each."""
    if pool in ("gateway", "up"):
        path = directory.log_file(pool)
        found = {0: path} if path.exists() else {}
    else:
        found = _newest_by_ordinal(directory.logs, pool)
    chosen = [path for ordinal, path in sorted(found.items()) if replica in (None, ordinal)]
    if not chosen:
        which = pool if replica is None else f"replica {replica} of {pool}"
        raise LocalError(f"there is no log of {which} in {directory.logs}")
    return chosen


def _newest_by_ordinal(folder: Path, pool: str) -> dict[int, Path]:
    """Names are `POOL-ORDINAL-REVISION.log`."""
    paths = sorted(folder.glob(f"{pool}-*-*.log"), key=lambda path: path.stat().st_mtime)
    return {int(path.name.split("-")[1]): path for path in paths}


def print_logs(paths: list[Path], tail: int | None, out: TextIO) -> None:
    """Write the files to `out`, each under its name if there are several."""
    for path in paths:
        if len(paths) > 1:
            out.write(f"==> {path.name} <==\n")
        if tail is not None:
            out.writelines(f"{line}\n" for line in last_lines(path, tail))
            continue
        with path.open(encoding="utf-8", errors="replace") as file:
            out.writelines(file)
    out.flush()


def follow_logs(paths: list[Path], out: TextIO) -> None:
    """Write what is appended to the files from now on, until interrupted."""
    files = {path: path.open("rb") for path in paths}
    for file in files.values():
        file.seek(0, 2)
    shown = paths[0]
    while True:
        for path, text in _news(files.items()):
            if path != shown:
                out.write(f"==> {path.name} <==\n")
                shown = path
            out.write(text)
        out.flush()
        time.sleep(_POLL_SECONDS)


def _news(files: Iterable[tuple[Path, BinaryIO]]) -> Iterable[tuple[Path, str]]:
    for path, file in files:
        if path.exists() and path.stat().st_size < file.tell():
            file.seek(0)  # rotation cut it
        text = file.read().decode(errors="replace")
        if text:
            yield path, text
