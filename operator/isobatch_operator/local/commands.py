"""Performs the commands `isobatch up`, `status`, `logs`, `rollout` and `down`.

Exit codes: 0 ok, 1 the answer is no, 2 wrong use.
"""

import os
import sys
import time

import yaml
from isobatch_cli.state_folder import state_root
from rich.console import Console

from isobatch_operator.local.directory import StateDirectory, known_names
from isobatch_operator.local.errors import NO, OK, LocalError, WrongUse, refuse
from isobatch_operator.local.log_reader import follow_logs, log_paths, print_logs
from isobatch_operator.local.options import (
    down_parser,
    logs_parser,
    rollout_parser,
    status_parser,
)
from isobatch_operator.local.ownership import current_state
from isobatch_operator.local.programs import Programs, Timings
from isobatch_operator.local.shutdown import stop_instance
from isobatch_operator.local.state import InstancePhase, LocalState
from isobatch_operator.local.table_view import state_table
from isobatch_operator.rollout import Phase, Verb

_PIPED_WIDTH = 400  # columns: whoever reads a pipe wants the whole detail


def up(argv: list[str]) -> int:
    """Serve a manifest as local processes."""
    # Here, not above: the other commands need no HTTP client, and should answer at once.
    from isobatch_operator.local.up_command import run_up

    return run_up(argv, Programs(), Timings())


def status(argv: list[str]) -> int:
    """Show an instance."""
    options = status_parser().parse_args(argv)
    try:
        directory = _directory(options.name)
        state = current_state(directory)
        if state is None:
            raise LocalError(f"{directory.path.name} has never run here: `isobatch up` starts it")
    except LocalError as exc:
        return refuse(exc)
    document = state.model_dump(mode="json", by_alias=True)
    match options.output:
        case "json":
            sys.stdout.write(state.model_dump_json(indent=2, by_alias=True) + "\n")
        case "yaml":
            sys.stdout.write(yaml.safe_dump(document, sort_keys=False, allow_unicode=True))
        case _:
            _print_state(state)
    return OK if state.phase is InstancePhase.READY else NO


def logs(argv: list[str]) -> int:
    """Show a log."""
    options = logs_parser().parse_args(argv)
    try:
        paths = log_paths(_directory(options.name), options.pool, options.replica)
        print_logs(paths, options.tail, sys.stdout)
        if options.follow:
            follow_logs(paths, sys.stdout)
    except LocalError as exc:
        return refuse(exc)
    return OK


def down(argv: list[str]) -> int:
    """Stop an instance."""
    options = down_parser().parse_args(argv)
    try:
        sys.stdout.write(stop_instance(_directory(options.name), at_once=options.now) + "\n")
    except LocalError as exc:
        return refuse(exc)
    return OK


def rollout(argv: list[str]) -> int:
    """Show or steer a rollout."""
    options = rollout_parser().parse_args(argv)
    try:
        directory = _directory(options.name)
        state = current_state(directory)
        if state is None or state.rollout is None or not _is_running(directory):
            raise LocalError(f"{directory.path.name} is not running: `isobatch up` starts it")
    except LocalError as exc:
        return refuse(exc)
    if options.verb != "status":
        directory.ask(Verb(options.verb))
        sys.stdout.write(f"{state.name}: asked to {options.verb}\n")
        return OK
    seen = state.rollout
    document = seen.model_dump(mode="json", by_alias=True)
    match options.output:
        case "json":
            sys.stdout.write(seen.model_dump_json(indent=2, by_alias=True) + "\n")
        case "yaml":
            sys.stdout.write(yaml.safe_dump(document, sort_keys=False, allow_unicode=True))
        case _:
            for key, value in document.items():
                sys.stdout.write(f"{key:<16} {'' if value is None else value}\n")
    return NO if seen.phase is Phase.FAILED else OK


def _directory(name: str | None) -> StateDirectory:
    """The instance asked for, or the only one there is."""
    root = state_root(os.environ)
    known = known_names(root)
    if name is not None:
        if name not in known:
            raise LocalError(f"{name} has never run here; known: {', '.join(known) or 'none'}")
        return StateDirectory(root / name)
    running = [n for n in known if _is_running(StateDirectory(root / n))]
    candidates = running or known
    match candidates:
        case [only]:
            return StateDirectory(root / only)
        case []:
            raise LocalError("nothing has run here yet: `isobatch up` starts the built-in model")
        case _:
            raise WrongUse(f"there are several, name one of: {', '.join(candidates)}")


def _is_running(directory: StateDirectory) -> bool:
    state = current_state(directory)
    return state is not None and state.phase not in (InstancePhase.STOPPED, InstancePhase.KILLED)


def _print_state(state: LocalState) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    where = f" at {state.url}/v1" if state.pools else ""
    console.print(f"{state.name}: {state.phase.value}{where}", markup=False, soft_wrap=True)
    if state.phase is InstancePhase.KILLED:
        console.print(
            f"the supervisor (pid {state.supervisor.pid}) was killed; below is what it saw last. "
            "`isobatch up` starts anew",
            markup=False,
        )
    if state.pools:
        console.print(state_table(state, time.time()))
    for pool in state.pools:
        for fingerprint in pool.fingerprints:
            console.print(f"{pool.name.value} fingerprint: {fingerprint}", soft_wrap=True)
    for problem in state.manifest_problems:
        console.print(f"refused edit: {problem}", markup=False, soft_wrap=True)
