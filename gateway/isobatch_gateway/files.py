"""Performs: creates files that their owner alone may read."""

import contextlib
import os
from pathlib import Path


def create_private(path: Path, content: bytes) -> None:
    """Write `path` if it does not exist; whoever looks finds it whole or not at all."""
    if path.exists():
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    with contextlib.suppress(FileExistsError):
        os.link(draft, path)
    draft.unlink()
