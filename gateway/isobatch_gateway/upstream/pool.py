"""Performs: keeps connections to replicas alive between requests."""

import asyncio
from collections import deque

from isobatch_gateway.errors import ConnectFailed, ConnectTimedOut
from isobatch_gateway.upstream.connection import Connection

_MOST_IDLE = 512
# vLLM closes an idle connection after 5 s: one that is dropped earlier is never found closed.
_IDLE_SECONDS = 4.0


class ConnectionPool:
    """The connections to one base URL, `http://host:port`.

    Its cost does not grow with what is in use: it knows the idle ones alone.
    """

    def __init__(self, url: str, connect_timeout: float) -> None:
        authority = url.removeprefix("http://")
        host, colon, port = authority.rpartition(":")
        # rpartition finds a colon inside a bare IPv6 literal; a port is digits alone.
        has_port = bool(colon) and port.isdigit()
        self.authority = authority
        self._host = (host if has_port else authority).strip("[]")
        self._port = int(port) if has_port else 80
        self._connect_timeout = connect_timeout
        self._idle: deque[Connection] = deque()
        self._is_closed = False

    def idle(self) -> Connection | None:
        """The idle connection that was used last, if any is still good."""
        oldest = asyncio.get_running_loop().time() - _IDLE_SECONDS
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.idle_since >= oldest:
                return connection
            connection.close()
        return None

    async def connect(self) -> Connection:
        """A fresh connection. Raises `ConnectFailed` or `ConnectTimedOut`."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await loop.create_connection(
                    lambda: Connection(self._release), self._host, self._port
                )
        except TimeoutError as exc:  # an OSError too: it comes first
            raise ConnectTimedOut(self.authority) from exc
        except OSError as exc:
            raise ConnectFailed(f"{self.authority}: {exc}") from exc
        return connection

    def prune(self) -> None:
        """Close what has been idle for too long."""
        oldest = asyncio.get_running_loop().time() - _IDLE_SECONDS
        while self._idle and (not self._idle[0].is_open or self._idle[0].idle_since < oldest):
            self._idle.popleft().close()

    def close(self) -> None:
        """Close the idle ones now and the others once their exchange is over."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().close()

    def _release(self, connection: Connection) -> None:
        if self._is_closed or len(self._idle) >= _MOST_IDLE:
            connection.close()
            return
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.append(connection)


class Pools:
    """The pools by base URL, shared by requests and control calls."""

    def __init__(self, connect_timeout: float) -> None:
        self._connect_timeout = connect_timeout
        self._by_url: dict[str, ConnectionPool] = {}

    def at(self, url: str) -> ConnectionPool:
        """The pool of `url`, made when it is first asked for."""
        pool = self._by_url.get(url)
        if pool is None:
            pool = self._by_url[url] = ConnectionPool(url, self._connect_timeout)
        return pool

    def drop(self, url: str) -> None:
        """Forget `url`."""
        pool = self._by_url.pop(url, None)
        if pool is not None:
            pool.close()

    def close(self) -> None:
        """Forget all."""
        for url in list(self._by_url):
            self.drop(url)
