"""Reads where the worker keeps what it can make again: converted models, digests, plans."""

import os
from collections.abc import Mapping
from pathlib import Path

from isobatch_worker.errors import CacheUnavailable


def default_cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """`ISOBATCH_CACHE_DIR`, else `$XDG_CACHE_HOME/isobatch`, else `~/.cache/isobatch`.

    Always absolute. Raises `CacheUnavailable` where none of the three is known.
    """
    if own := environ.get("ISOBATCH_CACHE_DIR"):
        return Path(own).absolute()
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():  # the XDG specification has relative ones ignored
        return base / "isobatch"
    try:
        return Path("~/.cache/isobatch").expanduser().absolute()
    except RuntimeError as exc:  # a container may run as a user id that has no home
        raise CacheUnavailable(
            "this user has no home folder to keep converted models in; set ISOBATCH_CACHE_DIR to "
            "a folder that may be written"
        ) from exc
