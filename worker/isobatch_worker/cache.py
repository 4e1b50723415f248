"""Reads where the worker keeps what it can make again: converted models, plans."""

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """`ISOBATCH_CACHE_DIR`, else `$XDG_CACHE_HOME/isobatch`, else `~/.cache/isobatch`."""
    if own := os.environ.get("ISOBATCH_CACHE_DIR"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "isobatch"
