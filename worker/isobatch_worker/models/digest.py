"""Computes the digest of a model folder: of every file that shapes an answer, by content alone."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_SHAPING = (
    "*.safetensors",
    "*.bin",
    "*.json",
    "*.model",
    "*.jinja",
    "*.txt",
    "*.py",
)
"""Weights, configs, tokenizer, chat template and remote code; not a README or dot files."""


def shaping_files(folder: Path) -> list[Path]:
    """The files below `folder` that shape an answer, by relative name."""
    found = {
        path
        for pattern in _SHAPING
        for path in folder.rglob(pattern)
        if path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    }
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def folder_digest(folder: Path) -> str:
    """`sha256:…` over name, size and content of the shaping files of `folder`.

    Times, owners and other files do not count.
    """
    files = shaping_files(folder)
    with ThreadPoolExecutor() as pool:
        contents = list(pool.map(_content_digest, files))
    listing = [
        [path.relative_to(folder).as_posix(), path.stat().st_size, content]
        for path, content in zip(files, contents, strict=True)
    ]
    return "sha256:" + hashlib.sha256(json.dumps(listing).encode()).hexdigest()


def _content_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
