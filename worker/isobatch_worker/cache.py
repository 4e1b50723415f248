"""Reads where the worker keeps what it can make again: converted models, plans."""

import os
import tempfile
from pathlib import Path

from isobatch_worker.errors import CacheUnusable


def default_cache_dir() -> Path:
    """`ISOBATCH_CACHE_DIR`, else `$XDG_CACHE_HOME/isobatch`, else `~/.cache/isobatch`."""
    if own := os.environ.get("ISOBATCH_CACHE_DIR"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "isobatch"


def usable_cache_dir() -> Path:
    """`default_cache_dir`, made if it is not there. Raises `CacheUnusable` where it cannot be."""
    path = default_cache_dir()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as exc:
        raise CacheUnusable(
            f"the cache folder {path} cannot be used ({exc.strerror}); models and plans are kept "
            "there: set ISOBATCH_CACHE_DIR to a folder that can be written to"
        ) from exc
    return path


def plans_dir(cache_dir: Path) -> Path:
    """Where the plans of workers are kept."""
    return cache_dir / "plans"
