"""Performs: the HTTP server: its listening socket, signals and drain."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from isobatch_gateway.errors import SettingsInvalid
from isobatch_gateway.protocol import BoundedProtocol
from isobatch_gateway.settings import Settings

_BACKLOG = 4096


class GatewayServer(uvicorn.Server):
    """uvicorn's server with our own way to stop: fail readiness, drain, then close."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: uvicorn would raise them again at the end, and exit by them."""
        yield


class Stopping:
    """Turns the first signal into a drain and the second into an end."""

    def __init__(
        self,
        server: GatewayServer,
        drain: Callable[[], None],
        is_idle: Callable[[], bool],
        end_all: Callable[[], None],
        settings: Settings,
    ) -> None:
        self._server = server
        self._drain = drain
        self._is_idle = is_idle
        self._end_all = end_all
        self._settings = settings
        self._task: asyncio.Task[None] | None = None
        self.was_forced = False

    def signalled(self) -> None:
        """Called by the loop at SIGTERM and SIGINT."""
        if self._task is None:
            self._task = asyncio.create_task(self._stop())
            return
        self.was_forced = True
        self._task.cancel()
        self._server.should_exit = self._server.force_exit = True

    async def _stop(self) -> None:
        self._drain()
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._settings.drain_delay)
        deadline = loop.time() + self._settings.timeouts.drain
        # An event would cost every request something; a drain happens once.
        while not self._is_idle() and loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        self._end_all()
        self._server.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """The listening socket. Raises `SettingsInvalid`, which names who has the port if it can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sets TCP_NODELAY on what it accepts; without, each answer of
    # two writes would wait 40 ms for an acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as exc:
        listener.close()
        holder = port_holder(port)
        by = f" by {holder}" if holder else ""
        problem = f"is taken{by}" if exc.errno == 98 else f"cannot be used: {exc.strerror}"
        raise SettingsInvalid(f"port {port} on {host} {problem}; choose another with --port") from (
            exc
        )
    listener.settimeout(0)
    return listener


def port_holder(port: int, proc: Path = Path("/proc")) -> str | None:
    """`process 123 (name)` if Linux lets us see who listens on `port`."""
    inodes = set()
    for table in ("net/tcp", "net/tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    for process in proc.iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            for handle in (process / "fd").iterdir():
                if str(handle.readlink()) in inodes:
                    name = (process / "comm").read_text().strip()
                    return f"process {process.name} ({name})"
    return None


def server_for(app: Any, settings: Settings) -> GatewayServer:
    """The server of `app`, not started."""
    protocol = type(
        "Protocol", (BoundedProtocol,), {"bounds": settings.bounds, "timeouts": settings.timeouts}
    )
    return GatewayServer(
        uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=int(settings.timeouts.keep_alive),
            timeout_graceful_shutdown=5,
        )
    )


SIGNALS = (signal.SIGTERM, signal.SIGINT)
