"""Computes the digest of a model folder: of every file that shapes an answer, by content alone."""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from isobatch_worker.errors import ModelUnavailable
from isobatch_worker.models.files import may_hold_shaping_files, shaping_files
from isobatch_worker.models.progress import Progress, silent
from isobatch_worker.models.sidecar import Hashed, Stamp, recall, remember

_READ_BYTES = 8 << 20
_MAX_THREADS = 8  # more than a disk or a network file system gains from


def folder_digest(
    folder: Path,
    *,
    cache_dir: Path | None = None,
    progress: Progress = silent,
    now_ns: Callable[[], int] = time.time_ns,
) -> str:
    """`sha256:…` over name, size and SHA-256 of each shaping file of `folder`, sorted by name.

    Times, owners and other files (README, dot files) do not count. With `cache_dir` the digest of
    each file is kept there, and a later call trusts it while name, size, mtime, ctime and inode of
    the file are the same: a write through the file system is seen, even one that puts the mtime
    back; decay on the disk underneath is not, nor is a forged sidecar. Without it, all is read.
    Raises `ModelUnavailable` when a file cannot be read or changes meanwhile.
    """
    try:
        files = {name: folder / name for name in shaping_files(file_names(folder))}
        stamps = {name: Stamp.of(path.stat()) for name, path in files.items()}
        known = recall(cache_dir, folder, stamps) if cache_dir else {}
        started = now_ns()
        fresh = _hash_all({n: p for n, p in files.items() if n not in known}, stamps, progress)
        changed = [name for name in fresh if Stamp.of(files[name].stat()) != stamps[name]]
    except OSError as exc:
        raise ModelUnavailable(
            f"{exc.filename or folder} cannot be read ({exc.strerror or exc}); expected every file "
            "of the model to be there and readable: copy it again or correct its permissions"
        ) from exc
    if changed:
        raise ModelUnavailable(
            f"{folder / changed[0]} changed while it was read; expected a folder at rest: wait "
            "until it is copied, then start again"
        )
    contents = {**known, **fresh}
    if cache_dir and fresh:
        remember(cache_dir, folder, {n: Hashed(stamps[n], contents[n]) for n in files}, started)
    return _canonical({name: (stamps[name].size, contents[name]) for name in files})


def file_names(folder: Path) -> list[str]:
    """Names of the files in `folder` and those subfolders that may matter, relative, with /."""
    names: list[str] = []
    for entry in folder.iterdir():
        if not entry.is_dir():
            names.append(entry.name)
        elif may_hold_shaping_files(entry.name):
            names += [f"{entry.name}/{below.name}" for below in entry.iterdir()]
    return names


def file_digest(path: Path, count: Callable[[int], None] = lambda _: None) -> str:
    """The SHA-256 of the content of `path`, in hex; `count` is told of each piece read."""
    sha = hashlib.sha256()
    buffer = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            sha.update(buffer[:size])
            count(size)
    return sha.hexdigest()


def _hash_all(
    files: Mapping[str, Path], stamps: Mapping[str, Stamp], progress: Progress
) -> dict[str, str]:
    """Name -> SHA-256, several files at a time: hashlib and read let other threads run."""
    total = sum(stamps[name].size for name in files)
    done, lock = 0, threading.Lock()

    def count(size: int) -> None:
        nonlocal done
        with lock:
            done += size
            progress(done, total)

    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads) as pool:
        hashed = pool.map(lambda path: file_digest(path, count), files.values())
        return dict(zip(files, hashed, strict=True))


def _canonical(contents: Mapping[str, tuple[int, str]]) -> str:
    listing = [[name, size, sha256] for name, (size, sha256) in sorted(contents.items())]
    text = json.dumps(listing, separators=(",", ":"), ensure_ascii=True)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
