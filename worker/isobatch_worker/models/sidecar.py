"""Keeps what files of a model folder hashed to, so that an unchanged folder is not read again.

One JSON file a folder, under `digests` of the cache directory and never in the model folder, which
may be read-only or shared. It is a convenience: what is unreadable or malformed counts as absent,
and what cannot be written is not kept.
"""

import contextlib
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import StringConstraints, TypeAdapter, ValidationError

_SETTLED_NS = 2_000_000_000
"""A file changed again within one tick of its file system's clock keeps its times. The coarsest
tick is two seconds (FAT), so the hash of a file that was changed later than that is not kept."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """What tells two states of a file apart without reading it. Only the kernel sets the ctime."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, stat: os.stat_result) -> Self:
        """The stamp in `stat`."""
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


@dataclass(frozen=True, slots=True)
class Hashed:
    """The SHA-256 that a file's content had when its stamp was `stamp`."""

    stamp: Stamp
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True, slots=True)
class _Sidecar:
    version: Literal[1]
    folder: str
    files: dict[str, Hashed]


_SIDECAR = TypeAdapter(_Sidecar)


def recall(cache_dir: Path, folder: Path, stamps: Mapping[str, Stamp]) -> dict[str, str]:
    """Name -> SHA-256 of those files of `folder` that have the stamp that they were hashed with."""
    try:
        kept = _SIDECAR.validate_json(_path(cache_dir, folder).read_bytes())
    except (OSError, ValidationError):
        return {}
    return {
        name: kept.files[name].sha256
        for name, stamp in stamps.items()
        if name in kept.files and kept.files[name].stamp == stamp
    }


def remember(
    cache_dir: Path, folder: Path, hashed: Mapping[str, Hashed], started_ns: int
) -> None:
    """Keep those of `hashed` that had settled when hashing them started."""
    files = {
        name: entry
        for name, entry in hashed.items()
        if max(entry.stamp.mtime_ns, entry.stamp.ctime_ns) + _SETTLED_NS < started_ns
    }
    text = _SIDECAR.dump_json(_Sidecar(1, str(folder.resolve()), files))
    target = _path(cache_dir, folder)
    # A full or read-only disk costs the next start some seconds, and must not cost this one.
    with contextlib.suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_suffix(f".{os.getpid()}")  # a reader never sees half a sidecar
        draft.write_bytes(text)
        draft.replace(target)


def _path(cache_dir: Path, folder: Path) -> Path:
    key = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]
    return cache_dir / "digests" / f"{key}.json"
