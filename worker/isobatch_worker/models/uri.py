"""Decides what a model URI names."""

import re
from dataclasses import dataclass
from pathlib import Path

from isobatch_worker.errors import ModelUriError

_EXPECTED = (
    "expected builtin://NAME, file:///absolute/path, hf://org/name[@revision] or pvc://claim/path"
)
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class Builtin:
    """A model that a package of ours brings."""

    name: str


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """A Hugging Face folder on this machine."""

    path: Path


@dataclass(frozen=True, slots=True)
class HubRepo:
    """A repository of the Hugging Face hub; `revision` None is its default branch."""

    repo_id: str
    revision: str | None


@dataclass(frozen=True, slots=True)
class ClaimPath:
    """A path on a PersistentVolumeClaim, which only a cluster mounts."""

    claim: str
    path: str


ModelUri = Builtin | LocalFolder | HubRepo | ClaimPath


def parse_uri(text: str) -> ModelUri:
    """What `text` names. Raises `ModelUriError`."""
    scheme, separator, rest = text.partition("://")
    if not separator or not rest:
        raise ModelUriError(f"{text!r} is no model URI; {_EXPECTED}")
    if scheme == "builtin":
        return Builtin(rest)
    if scheme == "file":
        if not rest.startswith("/"):
            raise ModelUriError(f"{text!r} is not absolute: write file:///absolute/path")
        return LocalFolder(Path(rest))
    if scheme == "hf":
        repo, at, revision = rest.partition("@")
        if not _REPO.fullmatch(repo) or (at and not revision):
            raise ModelUriError(f"{text!r} names no repository: write hf://org/name[@revision]")
        return HubRepo(repo, revision or None)
    if scheme == "pvc":
        claim, _, path = rest.partition("/")
        if not claim or not path:
            raise ModelUriError(f"{text!r} names no path on a claim: write pvc://claim/path")
        return ClaimPath(claim, path)
    raise ModelUriError(f"{text!r} has the unknown scheme {scheme!r}; {_EXPECTED}")
