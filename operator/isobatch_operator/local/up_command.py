"""Performs the command `isobatch up` for given programs."""

import os
import sys
from pathlib import Path

import psutil
from isobatch_cli.state_folder import state_root
from isobatch_contracts.resource import InferenceService

from isobatch_operator.local.directory import StateDirectory
from isobatch_operator.local.errors import INTERRUPTED, OK, LocalError, WrongUse, refuse
from isobatch_operator.local.fleet import Settings
from isobatch_operator.local.launch import Launcher, run_detached, run_foreground
from isobatch_operator.local.manifest_file import default_manifest, load_manifest
from isobatch_operator.local.options import up_parser
from isobatch_operator.local.programs import Listening, Programs, Timings
from isobatch_operator.local.supervisor import Request
from isobatch_operator.manifest import InvalidManifest


def run_up(argv: list[str], programs: Programs, timings: Timings) -> int:
    """`isobatch up ARGV`, starting `programs`."""
    options = up_parser().parse_args(argv)
    try:
        path = Path(options.file).absolute() if options.file else None
        service = _service(path)
        directory = StateDirectory(state_root(os.environ) / service.metadata.name)
        settings = Settings(directory.new_instance(), directory, programs, timings)
        wrapper = None if options.detach else _wrapper_pid()
        gateway = Listening(options.host, options.port, _keys(options.keys))
        request = Request(path, gateway, wrapper)
        launcher = Launcher(service, request, settings)
        if options.detach:
            run_detached(launcher, sys.stdout)
            return OK
        return OK if run_foreground(launcher, sys.stdout) else INTERRUPTED
    except LocalError as exc:
        return refuse(exc)


def _wrapper_pid() -> int | None:
    """Our parent if it is `uv run`: who kills that means us."""
    parent = os.getppid()
    try:
        return parent if psutil.Process(parent).name() == "uv" else None
    except psutil.Error:
        return None


def _keys(file: str | None) -> Path | None:
    path = Path(file).absolute() if file else None
    if path is not None and not path.is_file():
        raise WrongUse(f"--keys {file}: there is no such file; `isobatch key create` makes one")
    return path


def _service(path: Path | None) -> InferenceService:
    if path is None:
        return default_manifest()
    found = load_manifest(path)
    if isinstance(found, InvalidManifest):
        lines = "\n".join(f"  {problem}" for problem in found.problems)
        raise WrongUse(f"{path} is not a manifest that can be served here:\n{lines}")
    return found
