"""Performs the look for free ports, and says who has one that is taken."""

import errno
import ipaddress
import socket

import psutil

from isobatch_operator.local.errors import LocalError, PortTaken


def free_port(host: str) -> int:
    """A port of `host` that nobody listened on a moment ago."""
    with socket.socket(_family(host)) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def require_free(host: str, port: int) -> None:
    """Raise `PortTaken` if `port` of `host` cannot be listened on, naming who has it."""
    with socket.socket(_family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            # Two sockets may bind with SO_REUSEADDR; only one of them may listen.
            probe.listen(1)
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE:
                raise LocalError(f"cannot listen on {host}:{port}: {exc.strerror}") from exc
            owner = who_has(port)
            whose = f" by {owner}" if owner else f" ({exc.strerror})"
            raise PortTaken(
                f"port {port} of {host} is taken{whose}: stop it, or choose another with --port"
            ) from exc


def who_has(port: int) -> str | None:
    """The process that listens on `port`, as far as we may know."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.AccessDenied, OSError):
        return None
    for connection in connections:
        if connection.status != psutil.CONN_LISTEN or connection.pid is None:
            continue
        if not connection.laddr or connection.laddr.port != port:
            continue
        try:
            return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
        except psutil.Error:
            return f"pid {connection.pid}"
    return None


def base_url(host: str, port: int) -> str:
    """The URL under which a client of this machine reaches a server bound to `host`."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"http://{host}:{port}"
    if address.is_unspecified:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    return f"http://[{address}]:{port}" if address.version == 6 else f"http://{address}:{port}"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
