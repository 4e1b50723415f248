"""Performs the download of a model from the Hugging Face hub, or finds it in the hub's cache."""

import sys
from pathlib import Path
from typing import Any

from isobatch_worker.errors import ModelUnavailable
from isobatch_worker.models.files import hub_patterns
from isobatch_worker.models.uri import HubRepo

_TIMEOUT_SECONDS = 10.0
_NOT_NEEDED = ["onnx/*", "openvino/*", "original/*", "coreml/*"]
"""Folders in which repositories keep the same model in other forms."""


def fetch(repo: HubRepo) -> Path:
    """The folder of `repo` in the hub's own cache (`HF_HOME`), complete.

    The hub is asked once, without the client's retries, before anything is downloaded: a worker
    without a network falls back to the cache, or fails, in seconds and not in minutes. Raises
    `ModelUnavailable`.
    """
    import huggingface_hub  # half a second to import, for hf:// alone
    import httpx  # what the client raises from; comes with it
