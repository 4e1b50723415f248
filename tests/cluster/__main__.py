"""Starts and ends a cluster for people: `python -m tests.cluster up|down`."""

import argparse
import shutil
import signal
import sys
import time
from pathlib import Path

from tests.cluster import isolation
from tests.cluster.cluster import Cluster
from tests.cluster.errors import ClusterError
from tests.cluster.programs import cache_dir, programs_dir


def main() -> int:
    """Run the command; 0 ok, 1 with the reason, 2 wrong use."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="build what is missing, start, and say how to reach it")
    up.add_argument("--control-plane", action="store_true", help="no node; needs no root")
    commands.add_parser("down", help="end it; its logs stay")
    for command in commands.choices.values():
        command.add_argument("--dir", type=Path, default=cache_dir() / "cluster", help="its files")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started ends too
    try:
        if options.command == "up":
            _up(options.dir.absolute(), has_node=not options.control_plane)
        else:
            _down(options.dir.absolute())
    except ClusterError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


def _up(folder: Path, *, has_node: bool) -> None:
    if (folder / "state.json").exists():
        raise ClusterError(f"a cluster runs in {folder} already: end it with `down`")
    if has_node and (reason := isolation.missing()) is not None:
        raise ClusterError(f"{reason}. `up --control-plane` starts what needs none of this")
    programs = programs_dir()
    shutil.rmtree(folder, ignore_errors=True)  # the logs of the last one
    started = time.monotonic()
    cluster = Cluster.up(folder, programs, has_node=has_node)
    print(f"up in {time.monotonic() - started:.1f} s; use it by")
    print(f"  export KUBECONFIG={cluster.kubeconfig} PATH={programs}:$PATH")
    print(f"  {' '.join((*cluster.enter, 'kubectl get all --all-namespaces'))}")


def _down(folder: Path) -> None:
    if not (folder / "state.json").exists():
        raise ClusterError(f"no cluster runs in {folder}: nothing to end")
    Cluster.open(folder, programs_dir()).down()
    print(f"ended; logs are in {folder / 'logs'}")


if __name__ == "__main__":
    sys.exit(main())
