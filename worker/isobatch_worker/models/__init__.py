"""From a model URI to a folder that vLLM loads, with its digest."""

from isobatch_worker.models.digest import folder_digest
from isobatch_worker.models.progress import Progress, show_progress
from isobatch_worker.models.store import LoadedModel, resolve
from isobatch_worker.models.uri import Builtin, ClaimPath, HubRepo, LocalFolder, parse_uri

__all__ = [
    "Builtin",
    "ClaimPath",
    "HubRepo",
    "LoadedModel",
    "LocalFolder",
    "Progress",
    "folder_digest",
    "parse_uri",
    "resolve",
    "show_progress",
]
