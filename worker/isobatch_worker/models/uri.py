"""Decides what a model URI names."""

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NoReturn
from urllib.parse import quote, unquote

from isobatch_worker.errors import ModelUriError

_FORMS = "builtin://NAME, file:///absolute/path, hf://org/name[@revision] or pvc://claim/path"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,95}")
# The hub's own rule, but for its old names without an organisation: those are redirects.
_REPO = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9_][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9_][\w./+-]{0,254}", re.ASCII)
_CLAIM = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Builtin:
    """A model that a package of ours brings."""

    name: str

    def __str__(self) -> str:
        return f"builtin://{self.name}"


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """A Hugging Face folder on this machine; `path` is absolute."""

    path: Path

    def __str__(self) -> str:
        return f"file://{_quoted(str(self.path))}"


@dataclass(frozen=True, slots=True)
class HubRepo:
    """A repository of the Hugging Face hub; `revision` None is its default branch."""

    repo_id: str
    revision: str | None

    def __str__(self) -> str:
        return f"hf://{self.repo_id}" + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True, slots=True)
class ClaimPath:
    """A path on a PersistentVolumeClaim, relative to its root; only a cluster mounts it."""

    claim: str
    path: PurePosixPath

    def __str__(self) -> str:
        return f"pvc://{self.claim}/{self.path}"


ModelUri = Builtin | LocalFolder | HubRepo | ClaimPath


def parse_uri(text: str) -> ModelUri:
    """What `text` names; `str()` of the answer names the same. Raises `ModelUriError`."""
    scheme, separator, rest = text.partition("://")
    if _CONTROL.search(text):
        _refuse(text, "holds a control character", f"expected {_FORMS}", "remove it")
    if not separator and text.startswith("/"):
        _refuse(text, "is a bare path", "expected a URI", f"write file://{_quoted(text)}")
    if not separator or not rest:
        _refuse(text, "is no model URI", f"expected {_FORMS}", "write one of these")
    match scheme:
        case "builtin":
            return _builtin(text, rest)
        case "file":
            return _folder(text, rest)
        case "hf":
            return _repo(text, rest)
        case "pvc":
            return _claim(text, rest)
        case _:
            _refuse(text, f"has the unknown scheme {scheme!r}", f"expected {_FORMS}", "correct it")


def _builtin(text: str, rest: str) -> Builtin:
    if not _NAME.fullmatch(rest):
        _refuse(text, "names no built-in model", "expected a name of a-z, 0-9, '.', '_' and '-'")
    return Builtin(rest)


def _folder(text: str, rest: str) -> LocalFolder:
    path = unquote(rest, errors="surrogateescape")
    if not rest.startswith("/"):
        # `file://models/x` has the host "models": a slash was forgotten.
        _refuse(text, "is not absolute", "expected file:///path", f"write file:///{rest}")
    if _CONTROL.search(path):
        _refuse(text, "holds a control character", "expected file:///path", "remove it")
    if not path.strip("/"):
        _refuse(text, "names no folder", "expected file:///path", "add the folder's path")
    return LocalFolder(Path("/" + path.lstrip("/")))


def _repo(text: str, rest: str) -> HubRepo:
    repo_id, at, revision = rest.partition("@")
    expected = "expected hf://org/name[@revision]"
    if not _REPO.fullmatch(repo_id):
        _refuse(text, "names no repository of the hub", expected)
    if at and (not _REVISION.fullmatch(revision) or ".." in revision or "//" in revision):
        _refuse(text, f"has the malformed revision {revision!r}", expected, "drop @ or name one")
    return HubRepo(repo_id, revision if at else None)


def _claim(text: str, rest: str) -> ClaimPath:
    claim, _, path = rest.partition("/")
    expected = "expected pvc://claim/path"
    if not _CLAIM.fullmatch(claim):
        _refuse(text, f"has the malformed claim name {claim!r}", expected)
    if not path.strip("/") or ".." in path.split("/"):
        _refuse(text, "names no path inside the claim", expected, "add a path without '..'")
    return ClaimPath(claim, PurePosixPath(path.lstrip("/")))


def _quoted(path: str) -> str:
    return quote(path, errors="surrogateescape")  # a name on Linux need not be UTF-8


def _refuse(text: str, wrong: str, expected: str, remedy: str = "correct it") -> NoReturn:
    raise ModelUriError(f"model URI {text!r} {wrong}; {expected}: {remedy}")
