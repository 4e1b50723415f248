"""Decides the command lines of etcd, the API server, the controller manager and the scheduler."""

from dataclasses import dataclass
from pathlib import Path

SERVICE_RANGE = "10.96.0.0/16"
SERVICE_ADDRESS = "10.96.0.1"
POD_RANGE = "10.244.0.0/16"
BEFORE_READY = ("etcd", "kube-apiserver")
# The controller manager ends itself where the API server has not yet written its own roles.
AFTER_READY = ("kube-controller-manager", "kube-scheduler")


@dataclass(frozen=True, slots=True)
class Ports:
    """Where the control plane listens."""

    etcd: int = 2379
    etcd_peer: int = 2380
    api: int = 6443
    controllers: int = 10257
    scheduler: int = 10259


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """One control plane: its files below `folder`, its API at `address`."""

    folder: Path
    address: str
    ports: Ports

    @property
    def certificates(self) -> Path:
        """The folder of keys and certificates."""
        return self.folder / "certificates"

    @property
    def server(self) -> str:
        """The URL of the API server."""
        return f"https://{self.address}:{self.ports.api}"

    def kubeconfig(self, name: str = "admin") -> Path:
        """The kubeconfig of one client."""
        return self.folder / f"{name}.kubeconfig"

    def commands(self) -> dict[str, list[str]]:
        """Each program's arguments, in the order of their start."""
        return {
            "etcd": self._etcd(),
            "kube-apiserver": self._api_server(),
            "kube-controller-manager": self._controllers(),
            "kube-scheduler": self._scheduler(),
        }

    def _etcd(self) -> list[str]:
        client = f"http://127.0.0.1:{self.ports.etcd}"
        peer = f"http://127.0.0.1:{self.ports.etcd_peer}"
        return [
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--log-level=warn",
            # A killed etcd has written all it acknowledged; only a power cut could lose it.
            "--unsafe-no-fsync",
        ]

    def _api_server(self) -> list[str]:
        own = self.certificates
        # The API server refuses to be an endpoint at a loopback address.
        is_local = self.address.startswith("127.")
        endpoint = (
            "--endpoint-reconciler-type=none" if is_local else f"--advertise-address={self.address}"
        )
        return [
            endpoint,
            f"--etcd-servers=http://127.0.0.1:{self.ports.etcd}",
            f"--bind-address={self.address}",
            f"--secure-port={self.ports.api}",
            f"--service-cluster-ip-range={SERVICE_RANGE}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            f"--client-ca-file={own}/ca.crt",
            f"--tls-cert-file={own}/kube-apiserver.crt",
            f"--tls-private-key-file={own}/kube-apiserver.key",
            f"--kubelet-client-certificate={own}/kubelet-client.crt",
            f"--kubelet-client-key={own}/kubelet-client.key",
            "--kubelet-preferred-address-types=InternalIP",
            f"--service-account-key-file={own}/service-accounts.key",
            f"--service-account-signing-key-file={own}/service-accounts.key",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--requestheader-client-ca-file={own}/front-proxy-ca.crt",
            "--requestheader-allowed-names=front-proxy-client",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={own}/front-proxy.crt",
            f"--proxy-client-key-file={own}/front-proxy.key",
        ]

    def _client(self, name: str, port: int) -> list[str]:
        config = self.kubeconfig(name)
        return [
            f"--kubeconfig={config}",
            f"--authentication-kubeconfig={config}",
            f"--authorization-kubeconfig={config}",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            "--leader-elect=false",
        ]

    def _controllers(self) -> list[str]:
        own = self.certificates
        return [
            *self._client("kube-controller-manager", self.ports.controllers),
            # With the default rates its controllers start four seconds later.
            "--kube-api-qps=500",
            "--kube-api-burst=1000",
            "--use-service-account-credentials=true",
            f"--root-ca-file={own}/ca.crt",
            f"--service-account-private-key-file={own}/service-accounts.key",
            f"--cluster-signing-cert-file={own}/ca.crt",
            f"--cluster-signing-key-file={own}/ca.key",
            "--allocate-node-cidrs=true",
            f"--cluster-cidr={POD_RANGE}",
            f"--service-cluster-ip-range={SERVICE_RANGE}",
        ]

    def _scheduler(self) -> list[str]:
        return self._client("kube-scheduler", self.ports.scheduler)
