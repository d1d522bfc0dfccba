# SPDX-License-Identifier: Apache-2.0
"""A node as kubeadm makes it: a booted Debian 13 with its containerd, a kubelet and kube-proxy by units."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from tests.chart.control_plane import ControlPlane
from tests.cluster import components
from tests.cluster.components import DNS_ADDRESS, DOMAIN, NODE_ADDRESS
from tests.cluster.paths import PROGRAMS
from tests.e2e.booted import Booted
from tests.e2e.cleanroot import CleanRoot
from tests.infranetes.daemon.case import toml
from tests.interop.critest_images import PAUSE

NAME = "node"
NODE_SUBNET = "10.86.0.0/24"
DEVICES = ("net/tun", "kmsg")
# As in Kubernetes' own packages.
_KUBELET = """\
[Unit]
Description=kubelet: The Kubernetes Node Agent
Documentation=https://kubernetes.io/docs/
Wants=network-online.target
After=network-online.target

[Service]
ExecStart=/usr/bin/kubelet
Restart=always
StartLimitInterval=0
RestartSec=10

[Install]
WantedBy=multi-user.target
"""
_KUBEADM = """\
# Note: This dropin only works with kubeadm and kubelet v1.11+
[Service]
Environment="KUBELET_KUBECONFIG_ARGS=--bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf \
--kubeconfig=/etc/kubernetes/kubelet.conf"
Environment="KUBELET_CONFIG_ARGS=--config=/var/lib/kubelet/config.yaml"
EnvironmentFile=-/var/lib/kubelet/kubeadm-flags.env
EnvironmentFile=-/etc/default/kubelet
ExecStart=
ExecStart=/usr/bin/kubelet $KUBELET_KUBECONFIG_ARGS $KUBELET_CONFIG_ARGS \
$KUBELET_KUBEADM_ARGS $KUBELET_EXTRA_ARGS
"""
_PROXY = """\
[Unit]
Description=kube-proxy
[Service]
ExecStart=/usr/local/bin/kube-proxy --config=/etc/kubernetes/kube-proxy.json
Restart=always
[Install]
WantedBy=multi-user.target
"""
_NETWORK = {
    "cniVersion": "1.0.0",
    "name": "pods",
    "plugins": [
        {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "ipMasq": True,
            "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": NODE_SUBNET}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
    ],
}
_REGISTRIES = ("registry.example", "registry.k8s.io")


class KubeadmNode:
    """A root that becomes a node of a cluster. `boot` and `end` it.

    :ivar root: its files. :ivar system: its systemd, once it is booted.
    """

    system: Booted

    def __init__(self, root: CleanRoot, plane: ControlPlane, proxy: str) -> None:
        """:param proxy: kube-proxy's mode."""
        self.root = root
        self._plane = plane
        self._write("etc/hostname", f"{NAME}\n")
        self._write("etc/hosts", f"127.0.0.1 localhost\n{NODE_ADDRESS} {NAME}\n")
        self._write("etc/resolv.conf", "")
        self._have_containerd()
        self._have_kubelet()
        self._have_proxy(proxy)

    def boot(self) -> None:
        """Boot it into the control plane's network, where it joins the cluster."""
        for unit in ("containerd", "kubelet", "kube-proxy"):
            done = self.root.run("systemctl", "enable", unit)
            assert not done.returncode, done.stdout
        network = Path("/run/netns") / self._plane.space.name
        self.system = Booted(self.root, network, DEVICES, seconds=180.0)

    def end(self) -> None:
        """End its processes."""
        self.system.end()

    def journal(self, *units: str) -> str:
        """Return what units have written."""
        named = (f"--unit={unit}" for unit in units)
        return self.system.run("journalctl", "--no-pager", "--output=cat", *named).stdout

    def _write(self, path: str, text: str, mode: int = 0o644) -> None:
        file = self.root.path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)

    def _have_containerd(self) -> None:
        plugin = {
            "sandbox_image": f"registry.k8s.io/{PAUSE[0]}:{PAUSE[1]}",
            "restrict_oom_score_adj": True,  # may not be lowered without CAP_SYS_RESOURCE
            "cni": {"bin_dir": "/usr/lib/cni", "conf_dir": "/etc/cni/net.d"},
            "registry": {"config_path": "/etc/containerd/certs.d"},
        }
        config = {"version": 2, "plugins": {'"io.containerd.grpc.v1.cri"': plugin}}
        self._write("etc/containerd/config.toml", toml(config))
        for name in _REGISTRIES:
            host = f'[host."http://{self._plane.registry.host}"]\ncapabilities = ["pull", "resolve"]\n'
            self._write(f"etc/containerd/certs.d/{name}/hosts.toml", host)
        self._write("etc/cni/net.d/10-pods.conflist", json.dumps(_NETWORK))

    def _have_kubelet(self) -> None:
        shutil.copy(PROGRAMS / "kubelet", self.root.path / "usr/bin/kubelet")
        self._write("usr/lib/systemd/system/kubelet.service", _KUBELET)
        self._write("usr/lib/systemd/system/kubelet.service.d/10-kubeadm.conf", _KUBEADM)
        ca = self._plane.ca
        user = ca.kubeconfig(f"system:node:{NAME}", components.API_SERVER, ["system:nodes"])
        self._with_credentials("etc/kubernetes/kubelet.conf", user)
        certificate, key = ca.issue(f"kubelet-server-{NAME}", names=[NAME, NODE_ADDRESS])
        pki = self.root.path / "var/lib/kubelet/pki"
        pki.mkdir(parents=True)
        for source, name in ((ca.certificate, "ca.crt"), (certificate, "kubelet.crt"), (key, "kubelet.key")):
            shutil.copy(source, pki / name)
        self._write("var/lib/kubelet/config.yaml", json.dumps(_kubelet_configuration()))
        flags = (f"--hostname-override={NAME}", f"--node-ip={NODE_ADDRESS}")
        self._write("var/lib/kubelet/kubeadm-flags.env", f'KUBELET_KUBEADM_ARGS="{" ".join(flags)}"\n')

    def _have_proxy(self, mode: str) -> None:
        shutil.copy(PROGRAMS / "kube-proxy", self.root.path / "usr/local/bin/kube-proxy")
        self._write("etc/systemd/system/kube-proxy.service", _PROXY)
        user = self._plane.ca.kubeconfig("system:kube-proxy", components.API_SERVER)
        self._with_credentials("etc/kubernetes/kube-proxy.conf", user)
        config = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": mode,
            "clusterCIDR": components.PODS,
            "hostnameOverride": NAME,
            "clientConnection": {"kubeconfig": "/etc/kubernetes/kube-proxy.conf"},
            "oomScoreAdj": 0,
            "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        }
        self._write("etc/kubernetes/kube-proxy.json", json.dumps(config))

    def _with_credentials(self, path: str, kubeconfig: Path) -> None:
        """Write a kubeconfig with its certificates in it, as kubeadm does."""
        document = json.loads(kubeconfig.read_text())
        for entry, kind in ((document["clusters"][0], "cluster"), (document["users"][0], "user")):
            inner = entry[kind]
            for name in ("certificate-authority", "client-certificate", "client-key"):
                if name in inner:
                    inner[f"{name}-data"] = base64.b64encode(Path(inner.pop(name)).read_bytes()).decode()
        self._write(path, json.dumps(document), 0o600)


def _kubelet_configuration() -> Mapping[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": "/var/lib/kubelet/pki/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": "/var/lib/kubelet/pki/kubelet.crt",
        "tlsPrivateKeyFile": "/var/lib/kubelet/pki/kubelet.key",
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "clusterDNS": [DNS_ADDRESS],
        "clusterDomain": DOMAIN,
        "resolvConf": "/etc/resolv.conf",
        "cgroupDriver": "cgroupfs",
        # What a machine of tests can't give: see tests.cluster.components.
        "cgroupsPerQOS": False,
        "enforceNodeAllocatable": [],
        "failCgroupV1": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,
        "featureGates": {"KubeletInUserNamespace": True},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "evictionHard": {"memory.available": "64Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
    }
