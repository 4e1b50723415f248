"""Performs a conversion once for all processes of a machine, and finds its result again."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from isobatch_worker.errors import CacheUnavailable, ModelUnavailable
from isobatch_worker.models.digest import file_digest, folder_digest
from isobatch_worker.models.gguf_folder import CONVERTER, convert
from isobatch_worker.models.progress import ShowProgress

_RECORD = ".digest"
"""File in a converted folder: the digest that it had when it was whole. A dot file does not count."""


def converted(source: Path, name: str, cache_dir: Path, show: ShowProgress) -> tuple[Path, str]:
    """The folder that the GGUF `source` converts to, and its digest.

    It is made when it is not there, and again when it is damaged. Of several processes one converts
    and the others wait. A folder appears under its name only when it is whole, so a process or a
    machine that dies in the middle leaves a draft, which the next conversion removes.
    """
    try:
        key = file_digest(source)[:16]
        folder = cache_dir / "models" / f"{name}-{key}-{CONVERTER}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        if digest := _whole(folder, cache_dir):
            return folder, digest
        with _locked(folder.parent / f".{folder.name}.lock"):
            digest = _whole(folder, cache_dir)  # another process may have made it meanwhile
            return folder, digest or _make(source, folder, name, show)
    except OSError as exc:
        raise CacheUnavailable(
            f"{name} cannot be converted into {cache_dir} ({exc.filename}: {exc.strerror}); "
            "expected a folder that may be written, with room for the model: make room, or set "
            "ISOBATCH_CACHE_DIR to another folder"
        ) from exc


def _whole(folder: Path, cache_dir: Path) -> str | None:
    """The digest of `folder`, or None if it is not there or not as it was when converted."""
    try:
        recorded = (folder / _RECORD).read_text("ascii")
        return recorded if folder_digest(folder, cache_dir=cache_dir) == recorded else None
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError, ModelUnavailable):
        return None


def _make(source: Path, folder: Path, name: str, show: ShowProgress) -> str:
    """Convert into a draft beside `folder`, then move it there. Needs the lock."""
    drafts = f".{folder.name}.draft-"
    for leftover in folder.parent.glob(f"{drafts}*"):
        shutil.rmtree(leftover)
    draft = Path(tempfile.mkdtemp(prefix=drafts, dir=folder.parent))
    try:
        draft.chmod(0o755)  # mkdtemp's 0700 would keep a second user of the cache out
        with show(f"converting {name}") as progress:
            convert(source, draft, progress)
        digest = folder_digest(draft)
        (draft / _RECORD).write_text(digest, "ascii")
        _flush(draft)
        if folder.exists():  # damaged: out of the way in one step, for whoever is reading it
            folder.replace(Path(tempfile.mkdtemp(prefix=drafts, dir=folder.parent)))
        draft.replace(folder)
    finally:
        for leftover in folder.parent.glob(f"{drafts}*"):
            shutil.rmtree(leftover)
    return digest


def _flush(folder: Path) -> None:
    """Wait until the content is on the disk: a rename may get there first, before a power cut."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel frees it when its holder is killed."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
