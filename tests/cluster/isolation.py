"""Performs what keeps a node apart: network, mount and pid namespaces, and cgroups.

One process, the holder, is pid 1 of the pid namespace: with it every process of the node ends, and
with them every mount.
"""

import ctypes
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil

from tests.cluster.control_plane import SERVICE_RANGE
from tests.cluster.errors import ClusterError
from tests.cluster.node import KERNEL_SETTINGS, Node
from tests.cluster.processes import Running, run, start, wait_until

CGROUPS = Path("/sys/fs/cgroup")
CLONE_NEWNET = 0x40000000
NEEDED = {
    "containerd": "containerd",
    "runc": "runc",
    "nft": "nftables",
    "conntrack": "conntrack",
    "iptables": "iptables",
    "ip": "iproute2",
    "nsenter": "util-linux",
}
CNI_PLUGIN = Path("/usr/lib/cni/bridge")


def missing() -> str | None:
    """What a node needs and this machine lacks, or None."""
    if os.geteuid() != 0:
        return "needs root: a node makes namespaces, mounts and cgroups"
    packages = [package for program, package in NEEDED.items() if shutil.which(program) is None]
    if not CNI_PLUGIN.exists():
        packages.append("containernetworking-plugins")
    if packages:
        return f"needs packages: apt-get install {' '.join(packages)}"
    probe = ["unshare", "--mount", "--pid", "--net", "--fork", "--mount-proc", "true"]
    if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        return "needs namespaces: unshare of mount, pid and net is refused here"
    if not all(os.access(group, os.W_OK) for group in _hierarchies()):
        return f"needs cgroups: {CGROUPS} is not writable"
    return None


def _hierarchies() -> list[Path]:
    """The root of each cgroup hierarchy: one with cgroups v2, one a controller with v1."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    return [path for path in CGROUPS.iterdir() if path.is_dir() and not path.is_symlink()]


def network_namespace(name: str) -> Path:
    """Where the network namespace `name` is kept."""
    return Path("/run/netns", name)


def make_network(name: str, address: str) -> None:
    """Make the network namespace `name` whose own address is `address`."""
    run(["ip", "netns", "add", name])
    for command in (
        ["link", "set", "lo", "up"],
        ["addr", "add", f"{address}/32", "dev", "lo"],
        # Through `lo` a Service without endpoints would time out instead of refusing.
        ["link", "add", "services0", "type", "veth", "peer", "name", "services1"],
        ["link", "set", "services0", "up"],
        ["link", "set", "services1", "up"],
        ["route", "add", SERVICE_RANGE, "dev", "services0", "src", address],
    ):
        run(["ip", "-n", name, *command])
    forward = "echo 1 > /proc/sys/net/ipv4/ip_forward"
    run(["nsenter", f"--net={network_namespace(name)}", "sh", "-c", forward])


def make_cgroups(name: str) -> None:
    """Make the group `name` in each hierarchy."""
    for hierarchy in _hierarchies():
        group = hierarchy / name
        group.mkdir(exist_ok=True)
        if (hierarchy / "cpuset.cpus").exists():  # v1: empty in a new group, and then of no use
            for setting in ("cpuset.cpus", "cpuset.mems"):
                (group / setting).write_text((hierarchy / setting).read_text())


def remove_cgroups(name: str) -> None:
    """Remove the group `name`, and all below it, from each hierarchy."""
    # runc also makes a group in the v2 hierarchy beside v1's.
    for hierarchy in _hierarchies():
        if not (hierarchy / name).exists():
            continue
        below = [path for path in (hierarchy / name).rglob("*") if path.is_dir()]
        for group in (*sorted(below, key=lambda path: -len(path.parts)), hierarchy / name):
            wait_until(partial(_is_removed, group), f"{group} is still in use", 10)


def _is_removed(group: Path) -> bool:
    with suppress(OSError):  # busy: its last process has not quite ended
        group.rmdir()
    return not group.exists()


def start_holder(node: Node, pause: Path, log: Path) -> Running:
    """Start the process that the node's mount and pid namespaces live by."""
    folders = {"lib": "/var/lib", "log": "/var/log", "run": "/run"}
    # Shared by machines that run systemd: first private, so that no mount of ours leaves.
    lines = ["mount --make-rprivate /", "mount --make-rshared /"]
    for own, place in folders.items():
        (node.folder / own).mkdir(exist_ok=True)
        lines.append(f"mount --bind {shlex.quote(str(node.folder / own))} {place}")
    for setting, value in KERNEL_SETTINGS.items():
        file = node.settings / setting.replace("/", ".")
        file.write_text(f"{value}\n")
        lines.append(f"mount --bind {shlex.quote(str(file))} /proc/sys/{setting}")
    lines += ["touch /run/holder", f"exec {shlex.quote(str(pause))}"]
    outside = ["nsenter", f"--net={network_namespace(node.name)}"]
    apart = ["unshare", "--mount", "--pid", "--fork", "--mount-proc"]
    script = " && ".join(lines)
    holder = start([*outside, *apart, "sh", "-ec", script], log, enters=True)

    def is_ready() -> bool:
        if not holder.is_alive():
            raise ClusterError(f"the node's first process ended: {log.read_text()}")
        return (node.folder / "run/holder").exists()

    wait_until(is_ready, f"the node's mounts; see {log}")
    return holder


def entering(holder: Running) -> list[str]:
    """The prefix that runs a command inside the node's namespaces."""
    return ["nsenter", "-t", str(holder.pid), "--net", "--mount", "--pid"]


def remove_network(name: str) -> None:
    """End what still runs in the network namespace `name`, and remove it."""
    namespace = network_namespace(name)
    if not namespace.exists():
        return
    for pid in run(["ip", "netns", "pids", name]).split():
        with suppress(psutil.NoSuchProcess):
            Running.of(int(pid)).kill("a client in the cluster's network")
    run(["ip", "netns", "del", name])


@contextmanager
def inside_network(name: str) -> Iterator[None]:
    """This thread, and what it starts meanwhile, in the network namespace `name`."""
    library = ctypes.CDLL(None, use_errno=True)

    def enter(descriptor: int) -> None:
        if library.setns(descriptor, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network of {name}")

    with Path("/proc/thread-self/ns/net").open() as own, network_namespace(name).open() as other:
        enter(other.fileno())
        try:
            yield
        finally:
            enter(own.fileno())
