"""Hands what the engine found of its numerics to the API server, by one file written whole.

Engine and API server are processes of one worker; the file lies in the worker's own run folder.
"""

import os
from pathlib import Path

from isobatch_contracts.numerics import Certified, NotCertified
from pydantic import TypeAdapter

REPORT_FILE = "ISOBATCH_NUMERICS_REPORT"
"""Environment variable with the path of the file; set by `isobatch worker`."""

Report = Certified | NotCertified
_REPORT: TypeAdapter[Report] = TypeAdapter(Report)


def write_report(path: Path, report: Report) -> None:
    """Replace the report at `path`, atomically."""
    draft = path.with_suffix(".draft")
    draft.write_text(report.model_dump_json())
    draft.replace(path)


def read_report(path: Path) -> Report:
    """The report at `path`; one not yet written is a certification not yet done."""
    try:
        return _REPORT.validate_json(path.read_bytes())
    except FileNotFoundError:
        return NotCertified(state="certifying", reason="the engine is loading the model")


def report_path() -> Path:
    """Where this worker's report lies. Raises KeyError outside of `isobatch worker`."""
    return Path(os.environ[REPORT_FILE])
