"""Decides where `isobatch up` keeps its state: for what runs it, and for what looks it up."""

from collections.abc import Mapping
from pathlib import Path


def state_root(environ: Mapping[str, str]) -> Path:
    """Where the instances of this user are: `ISOBATCH_STATE_DIR`, or as XDG says."""
    override = environ.get("ISOBATCH_STATE_DIR")
    if override:
        return Path(override).absolute()
    home = environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home).absolute() / "isobatch"
