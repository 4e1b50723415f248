"""Decides what a node's programs are told: containerd, kubelet, kube-proxy, the pods' network."""

from dataclasses import dataclass
from pathlib import Path

from tests.cluster import images
from tests.cluster.control_plane import POD_RANGE

FIRST_POD_RANGE = "10.244.0.0/24"  # what the controller manager gives the first node
SOCKET = "/run/containerd/containerd.sock"
# kubelet ends itself where it can neither find nor write these. The node sees files in their place;
# the machine keeps its own values.
KERNEL_SETTINGS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}


@dataclass(frozen=True, slots=True)
class Node:
    """One node: its files below `folder`, its address in a network namespace of its own."""

    name: str
    address: str
    folder: Path
    certificates: Path

    @property
    def settings(self) -> Path:
        """The folder of the files that configure its programs."""
        return self.folder / "settings"

    def containerd(self) -> str:
        """containerd's configuration (TOML)."""
        return f"""\
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
oom_score = 0
disabled_plugins = [
  "io.containerd.internal.v1.opt",
  "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs",
]
[grpc]
address = "{SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{images.PAUSE}"
# A container's score may be no lower than ours: lowering it needs CAP_SYS_RESOURCE.
restrict_oom_score_adj = true
disable_apparmor = true
disable_hugetlb_controller = true
tolerate_missing_hugetlb_controller = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "{self.settings}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd]
default_runtime_name = "runc"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false
"""

    def network(self) -> dict[str, object]:
        """The CNI configuration: one bridge, addresses by the host."""
        bridge = {
            "type": "bridge",
            "bridge": "pods",
            "isDefaultGateway": True,
            "hairpinMode": True,
            "ipam": {"type": "host-local", "ranges": [[{"subnet": FIRST_POD_RANGE}]]},
        }
        ports = {"type": "portmap", "capabilities": {"portMappings": True}}
        return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge, ports]}

    def kubelet(self) -> dict[str, object]:
        """kubelet's configuration."""
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": self.address,
            "authentication": {
                "anonymous": {"enabled": False},
                "x509": {"clientCAFile": f"{self.certificates}/ca.crt"},
                "webhook": {"enabled": True},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": f"{self.certificates}/kubelet.crt",
            "tlsPrivateKeyFile": f"{self.certificates}/kubelet.key",
            "containerRuntimeEndpoint": f"unix://{SOCKET}",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.name}",
            "failCgroupV1": False,
            "failSwapOn": False,
            "featureGates": {"KubeletInUserNamespace": True},
            "maxOpenFiles": 20000,
            "oomScoreAdj": 0,
            # The disk is the machine's: how full it is says nothing about the node.
            "evictionHard": {
                "memory.available": "100Mi",
                "nodefs.available": "1%",
                "imagefs.available": "1%",
            },
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "nodeStatusUpdateFrequency": "4s",
            "resolvConf": f"{self.settings}/resolv.conf",
            "volumePluginDir": "/var/lib/kubelet/volumeplugins",
        }

    def kube_proxy(self, kubeconfig: Path) -> dict[str, object]:
        """kube-proxy's configuration."""
        return {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "nftables",
            "clientConnection": {"kubeconfig": str(kubeconfig)},
            "clusterCIDR": POD_RANGE,
            "hostnameOverride": self.name,
            "oomScoreAdj": 0,
            "conntrack": {"maxPerCore": 0, "min": 0},
            "metricsBindAddress": "127.0.0.1:10249",
            "healthzBindAddress": "127.0.0.1:10256",
        }
