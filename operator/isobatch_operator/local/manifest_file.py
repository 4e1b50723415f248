"""Performs the reading and watching of a manifest file."""

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import structlog
from isobatch_contracts.resource import InferenceService
from watchfiles import awatch

from isobatch_operator.manifest import InvalidManifest, parse_manifest

_LOOK_EVERY_MS = 3000


def default_manifest() -> InferenceService:
    """The service of `isobatch up` without a file."""
    text = files("isobatch_operator.local").joinpath("default.yaml").read_text(encoding="utf-8")
    service = parse_manifest(text)
    assert isinstance(service, InferenceService), service
    return service


def load_manifest(path: Path) -> InferenceService | InvalidManifest:
    """The service in `path`, if local processes can serve it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        return InvalidManifest((f"cannot be read: {exc}",))
    service = parse_manifest(text)
    if isinstance(service, InferenceService) and service.spec.model.uri.startswith("pvc://"):
        return InvalidManifest(
            (
                "spec.model.uri: pvc:// exists in a cluster only; expected file://, hf:// or builtin://",
            )
        )
    return service


async def watch_manifest(path: Path, look: Callable[[], None]) -> None:
    """Call `look` when `path` may have changed, and every few seconds in any case.

    The folder is watched, not the file: editors replace a file, and a watch would stay on the old.
    """
    try:
        await _watch(path, look, force_polling=None)
    except OSError as exc:  # no inotify left, or a file system without it
        structlog.get_logger("isobatch.up").warning("watch", reason=str(exc), instead="polling")
        await _watch(path, look, force_polling=True)


async def _watch(path: Path, look: Callable[[], None], *, force_polling: bool | None) -> None:
    async for _ in awatch(
        path.parent,
        watch_filter=lambda _, name: Path(name).name == path.name,
        recursive=False,
        force_polling=force_polling,
        debounce=200,
        rust_timeout=_LOOK_EVERY_MS,
        yield_on_timeout=True,
    ):
        look()
