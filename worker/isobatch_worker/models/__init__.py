"""From a model URI to a folder that vLLM loads, with its digest.

`uri` reads the URI, `store` goes from there to the folder: `converted` makes it once from a GGUF
(`gguf_folder`, with `gguf_metadata`, `gguf_config`, `gguf_tokenizer` and `gguf_tensors`), `hub`
downloads it. `files` says which files count, `digest` and `sidecar` take their digest.
"""

from isobatch_worker.models.digest import folder_digest
from isobatch_worker.models.gguf_folder import convert
from isobatch_worker.models.progress import Progress, ShowProgress, show_progress
from isobatch_worker.models.store import LoadedModel, resolve
from isobatch_worker.models.uri import (
    Builtin,
    ClaimPath,
    HubRepo,
    LocalFolder,
    ModelUri,
    parse_uri,
)

__all__ = [
    "Builtin",
    "ClaimPath",
    "HubRepo",
    "LoadedModel",
    "LocalFolder",
    "ModelUri",
    "Progress",
    "ShowProgress",
    "convert",
    "folder_digest",
    "parse_uri",
    "resolve",
    "show_progress",
]
