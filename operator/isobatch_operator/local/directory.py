"""Performs reads and writes of the state directory of one instance.

`$XDG_STATE_HOME/isobatch/NAME/` holds `state.json`, `tables/table.json` (a folder of its own, since
the gateway reads every `*.json` of one), `logs/`, `secret` and `lock`, and what the gateway keeps
there: `receipts.db` and its keys. Every write of ours is atomic.
"""

import fcntl
import hashlib
import os
import secrets
from pathlib import Path
from typing import IO

from isobatch_contracts import routing_table
from isobatch_contracts.routing_table import RoutingTable
from pydantic import ValidationError

from isobatch_operator.local.state import LocalState
from isobatch_operator.rollout import Verb


def known_names(root: Path) -> list[str]:
    """The instances that have left a state under `root`."""
    return sorted(path.parent.name for path in root.glob("*/state.json"))


class StateDirectory:
    """The files of one instance. Nothing is created before it is written."""

    def __init__(self, path: Path) -> None:
        """`path` is the instance's own folder."""
        self.path = path
        self.logs = path / "logs"
        self.tables = path / "tables"
        self.table_file = self.tables / "table.json"
        self.receipts = path / "receipts.db"
        self.state_file = path / "state.json"

    @property
    def instance_prefix(self) -> str:
        """What the instance tags of this directory begin with, even if its state is lost."""
        return hashlib.sha256(str(self.path).encode()).hexdigest()[:12] + "-"

    def new_instance(self) -> str:
        """A tag for the processes of one `up`."""
        return self.instance_prefix + secrets.token_hex(4)

    def log_file(self, name: str) -> Path:
        """The log of the process `name`."""
        return self.logs / f"{name}.log"

    def try_lock(self) -> IO[str] | None:
        """The lock of the instance, held until the file is closed; None if another holds it."""
        self.path.mkdir(parents=True, exist_ok=True)
        file = (self.path / "lock").open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        return file

    def read_state(self) -> LocalState | None:
        """The last state written; None if there is none that this version understands."""
        try:
            return LocalState.model_validate_json(self.state_file.read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def write_state(self, state: LocalState) -> None:
        """Replace `state.json`."""
        _write(self.state_file, state.model_dump_json(indent=2, by_alias=True))

    def read_table(self) -> RoutingTable | None:
        """The last table published; None if there is no sound one."""
        try:
            return routing_table.load(self.table_file.read_bytes())
        except (FileNotFoundError, routing_table.TableRejected):
            return None

    def write_table(self, table: RoutingTable) -> None:
        """Publish `table` to the gateway."""
        _write(self.table_file, routing_table.dump(table))

    def ask(self, verb: Verb) -> None:
        """Leave `verb` for the `up` that runs here."""
        _write(self.path / "verb", verb.value)

    def take_verb(self) -> Verb | None:
        """The verb that was left, once."""
        path = self.path / "verb"
        try:
            found = Verb(path.read_text())
        except FileNotFoundError:
            return None
        except ValueError:
            found = None  # nothing of ours
        path.unlink(missing_ok=True)
        return found

    def secret_file(self) -> Path:
        """The gateway's secret, made on first use and readable by its owner alone."""
        path = self.path / "secret"
        if not path.exists():
            _write(path, secrets.token_hex(32) + "\n")
        return path


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    scratch.replace(path)
