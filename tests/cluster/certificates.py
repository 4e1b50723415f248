"""Performs the making of a cluster's keys, certificates and kubeconfigs."""

import json
from base64 import b64encode
from pathlib import Path

import trustme

SERVICE_NAMES = (
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
)
# Kubernetes reads a client's user from the common name and its group from the organisation.
CLIENTS = {
    "admin": ("admin", "system:masters"),
    "kube-controller-manager": ("system:kube-controller-manager", None),
    "kube-scheduler": ("system:kube-scheduler", None),
    "kube-proxy": ("system:kube-proxy", None),
    "kubelet-client": ("kube-apiserver-kubelet-client", "system:masters"),
}
WITH_KUBECONFIG = ("admin", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet")


def make_certificates(folder: Path, node: str, address: str, service_address: str) -> None:
    """Write `ca.crt`, `front-proxy-ca.crt` and a `.crt` and `.key` for each program."""
    folder.mkdir(mode=0o700)
    authority, proxy_authority = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.crt")
    authority.private_key_pem.write_to_path(folder / "ca.key")
    proxy_authority.cert_pem.write_to_path(folder / "front-proxy-ca.crt")

    server = authority.issue_cert(
        *SERVICE_NAMES, "localhost", "127.0.0.1", service_address, address, common_name="kubernetes"
    )
    _write(folder, "kube-apiserver", server)
    kubelet = authority.issue_cert(
        node, address, common_name=f"system:node:{node}", organization_name="system:nodes"
    )
    _write(folder, "kubelet", kubelet)
    for name, (user, group) in CLIENTS.items():
        # A name of its own too: Go refuses a certificate whose list of names is critical and empty.
        issued = authority.issue_cert(name, common_name=user, organization_name=group)
        _write(folder, name, issued)
    _write(
        folder,
        "front-proxy",
        proxy_authority.issue_cert("front-proxy", common_name="front-proxy-client"),
    )
    # Signs the tokens of service accounts; of its certificate only the key is read.
    _write(folder, "service-accounts", authority.issue_cert("service-accounts"))


def write_kubeconfigs(folder: Path, certificates: Path, server: str) -> None:
    """Write `NAME.kubeconfig` for each client, whole in itself."""
    for name in WITH_KUBECONFIG:
        user = {
            "client-certificate-data": _base64(certificates / f"{name}.crt"),
            "client-key-data": _base64(certificates / f"{name}.key"),
        }
        cluster = {
            "server": server,
            "certificate-authority-data": _base64(certificates / "ca.crt"),
        }
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": name}}],
        }
        path = folder / f"{name}.kubeconfig"
        path.touch(mode=0o600)
        path.write_text(json.dumps(config))


def _base64(path: Path) -> str:
    return b64encode(path.read_bytes()).decode()


def _write(folder: Path, name: str, issued: trustme.LeafCert) -> None:
    issued.cert_chain_pems[0].write_to_path(folder / f"{name}.crt")
    key = folder / f"{name}.key"
    key.touch(mode=0o600)
    issued.private_key_pem.write_to_path(key)
