"""Performs the life of a cluster: start, faults, end. All it leaves behind is in its own folder."""

import json
import os
import random
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.cluster import isolation
from tests.cluster.certificates import make_certificates, write_kubeconfigs
from tests.cluster.control_plane import (
    AFTER_READY,
    BEFORE_READY,
    SERVICE_ADDRESS,
    ControlPlane,
    Ports,
)
from tests.cluster.errors import ClusterError
from tests.cluster.node import SOCKET, Node
from tests.cluster.processes import Running, run, start, wait_until
from tests.cluster.state import State

NODE_ADDRESS = "10.99.0.1"
NODE_PROGRAMS = ("containerd", "kubelet", "kube-proxy")


class Cluster:
    """A Kubernetes of one node, or its control plane alone."""

    def __init__(self, folder: Path, programs: Path, state: State) -> None:
        self.folder = folder
        self.programs = programs
        self._state = state
        self._plane = ControlPlane(folder, state.address, state.ports)
        self._node = Node(state.name, state.address, folder, self._plane.certificates)

    @classmethod
    def open(cls, folder: Path, programs: Path) -> "Cluster":
        """The cluster that was started in `folder`."""
        return cls(folder, programs, State.read(folder))

    @classmethod
    def up(
        cls, folder: Path, programs: Path, *, has_node: bool, owner: Running | None = None
    ) -> "Cluster":
        """Start a cluster in the new folder `folder`; all of it ends again where that fails.

        Once `owner` has ended without `down`, `remove_leftovers` ends the cluster.
        """
        folder.mkdir(parents=True)
        address, ports = (NODE_ADDRESS, Ports()) if has_node else ("127.0.0.1", _free_ports())
        state = State(
            name=f"isobatch-{os.getpid()}-{random.randrange(16**4):04x}",
            address=address,
            ports=ports,
            has_node=has_node,
            owner=owner,
        )
        state.write(folder)
        cluster = cls(folder, programs, state)
        try:
            cluster._start_all()
        except BaseException:
            cluster.down()
            raise
        return cluster

    @property
    def kubeconfig(self) -> Path:
        """The kubeconfig of an administrator."""
        return self._plane.kubeconfig()

    @property
    def logs(self) -> Path:
        """The folder with each program's log."""
        return self.folder / "logs"

    @property
    def enter(self) -> tuple[str, ...]:
        """The prefix that runs a command where the cluster's addresses can be reached."""
        if not self._state.has_node:
            return ()
        return ("nsenter", f"--net={isolation.network_namespace(self._state.name)}")

    @property
    def environment(self) -> dict[str, str]:
        """What kubectl and helm must find in their environment."""
        own = {"KUBECONFIG": str(self.kubeconfig), "KUBECACHEDIR": str(self.folder / "cache")}
        return os.environ | own | {"HELM_CACHE_HOME": str(self.folder / "helm")}

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Let this thread, and what it starts meanwhile, reach the cluster's addresses."""
        if not self._state.has_node:
            yield
            return
        with isolation.inside_network(self._state.name):
            yield

    def run(self, *command: str, text: str | None = None, check: bool = True) -> str:
        """Run a program that reaches the cluster, and return its output.

        Raises ClusterError, with its errors, where it fails; with `check=False` returns them.
        """
        ran = subprocess.run(
            [*self.enter, *command],
            input=text,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode == 0:
            return ran.stdout
        if check:
            raise ClusterError(f"`{' '.join(command)}` ended with {ran.returncode}: {ran.stderr}")
        return ran.stdout + ran.stderr

    def kubectl(self, *arguments: str, text: str | None = None, check: bool = True) -> str:
        """Run kubectl as an administrator; `text` is what `-f -` reads. As `run`."""
        return self.run(str(self.programs / "kubectl"), *arguments, text=text, check=check)

    def is_alive(self, program: str) -> bool:
        """Whether `program` (kubelet, etcd, …) runs."""
        return self._state.programs[program].is_alive()

    def kill(self, program: str) -> None:
        """End `program` as a crash does: SIGKILL, now."""
        self._state.programs[program].kill(program)

    def restart(self, program: str) -> None:
        """Start `program` again after `kill`, with the arguments it had."""
        if self.is_alive(program):
            raise ValueError(f"{program} runs: kill it first")
        self._start(program)
        if program in BEFORE_READY and self.is_alive("kube-apiserver"):
            self._wait_for_api()

    def down(self) -> None:
        """End every process, and remove mounts, namespaces, cgroups and files but the logs."""
        state = self._state
        if state.has_node:
            for program in (
                "kube-proxy",
                "kubelet",
            ):  # before their API, so that neither waits for it
                if program in state.programs:
                    state.programs[program].end(program)
            if state.holder is not None:
                state.holder.kill("the node's first process")
            isolation.remove_network(state.name)
            isolation.remove_cgroups(state.name)
        for process in self._own_processes():
            process.kill("a program of the cluster")
        left = [*state.programs.values(), *([state.holder] if state.holder else [])]
        wait_until(lambda: all(process.is_gone() for process in left), f"zombies among {left}", 10)
        for path in self.folder.iterdir():
            if path != self.logs:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _own_processes(self) -> list[Running]:
        """Programs that name our folder: also one that was started but not yet noted."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                is_ours = Path(process.exe()).is_relative_to(self.programs)
                if is_ours and any(str(self.folder) in word for word in process.cmdline()):
                    found.append(Running(process.pid, process.create_time()))
        return found

    def _start_all(self) -> None:
        self.logs.mkdir()
        plane, state = self._plane, self._state
        if state.has_node:
            isolation.make_network(state.name, state.address)
            isolation.make_cgroups(state.name)
        make_certificates(plane.certificates, state.name, state.address, SERVICE_ADDRESS)
        write_kubeconfigs(self.folder, plane.certificates, plane.server)
        if state.has_node:
            self._write_settings()
            pause, log = self.programs / "pause", self.logs / "holder.log"
            state.holder = isolation.start_holder(self._node, pause, log)
            state.write(self.folder)
        for program in BEFORE_READY:
            self._start(program)
        if state.has_node:
            self._start("containerd")
            self._import_images()
        self._wait_for_api()
        for program in (*AFTER_READY, *(NODE_PROGRAMS[1:] if state.has_node else ())):
            self._start(program)
        # The controller manager is at work once it has made this one.
        self.wait_for("service account", "get", "serviceaccount", "default", "--namespace=default")
        if state.has_node:
            self.wait_for(
                "node", "wait", "--for=condition=Ready", "node", state.name, "--timeout=1s"
            )

    def wait_for(self, what: str, *arguments: str) -> None:
        """Poll until kubectl succeeds; raises ClusterError at once where a program of ours ends."""

        def succeeds() -> bool:
            for name, process in self._state.programs.items():
                if not process.is_alive():
                    last = (self.logs / f"{name}.log").read_text()[-2000:]
                    raise ClusterError(f"{name} ended while the cluster waited for {what}: {last}")
            command = [*self.enter, str(self.programs / "kubectl"), *arguments]
            ran = subprocess.run(command, env=self.environment, capture_output=True, check=False)
            return ran.returncode == 0

        wait_until(succeeds, f"no {what}; logs in {self.logs}", 120)

    def _wait_for_api(self) -> None:
        self.wait_for("API server", "get", "--raw", "/readyz")

    def _start(self, program: str) -> None:
        path = program if program == "containerd" else str(self.programs / program)
        command = [path, *self._arguments(program)]
        holder = self._state.holder
        if holder is not None:
            command = [*isolation.entering(holder), *command]
        log = self.logs / f"{program}.log"
        self._state.programs[program] = start(command, log, enters=holder is not None)
        self._state.write(self.folder)

    def _arguments(self, program: str) -> list[str]:
        settings, node = self._node.settings, self._node
        match program:
            case "containerd":
                return ["--config", str(settings / "containerd.toml")]
            case "kube-proxy":
                return ["--config", str(settings / "kube-proxy.json")]
            case "kubelet":
                return [
                    f"--config={settings / 'kubelet.json'}",
                    f"--kubeconfig={self._plane.kubeconfig('kubelet')}",
                    f"--hostname-override={node.name}",
                    f"--node-ip={node.address}",
                ]
            case _:
                return self._plane.commands()[program]

    def _write_settings(self) -> None:
        settings, node = self._node.settings, self._node
        (settings / "cni").mkdir(parents=True)
        proxy = node.kube_proxy(self._plane.kubeconfig("kube-proxy"))
        # Where it were empty, containerd would give pods the machine's own.
        (settings / "resolv.conf").write_text("options ndots:5\n")
        (settings / "containerd.toml").write_text(node.containerd())
        (settings / "cni/10-pods.conflist").write_text(json.dumps(node.network()))
        (settings / "kubelet.json").write_text(json.dumps(node.kubelet()))
        (settings / "kube-proxy.json").write_text(json.dumps(proxy))

    def _import_images(self) -> None:
        holder = self._state.holder
        assert holder is not None, "images are a node's"
        ctr = [*isolation.entering(holder), "ctr", f"--address={SOCKET}", "--namespace=k8s.io"]
        probe = [*ctr, "version"]
        wait_until(
            lambda: subprocess.run(probe, capture_output=True, check=False).returncode == 0,
            f"containerd does not serve; see {self.logs}/containerd.log",
        )
        for image in ("pause.tar", "host.tar"):
            run([*ctr, "images", "import", str(self.programs / image)])


def remove_leftovers(parent: Path, programs: Path) -> None:
    """End each cluster below `parent` whose owner ended without ending it, by kill -9 say."""
    for kept in parent.glob("*/state.json"):
        cluster = Cluster.open(kept.parent, programs)
        owner = cluster._state.owner
        if owner is not None and not owner.is_alive():
            cluster.down()
            shutil.rmtree(cluster.folder)


def _free_ports() -> Ports:
    """Five free ports, below those that the kernel gives to connections."""
    found: list[int] = []
    while len(found) < 5:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
    return Ports(*found)
