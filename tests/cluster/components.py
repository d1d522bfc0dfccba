# SPDX-License-Identifier: Apache-2.0
"""The programs of the cluster: the command line and the configuration of each.

They run in namespaces of their own, so that addresses and most paths are the same everywhere. Programs that
take a node as a parameter run there; the others run on the first node."""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from tests.cluster import images
from tests.cluster.nodes import Node, address_of
from tests.cluster.paths import PROGRAMS, ROOT, Paths
from tests.cluster.pki import Authority
from tests.infranetes.daemon.case import toml

NODE_ADDRESS = address_of(1)  # the address of the control plane
SERVICES, PODS = "10.96.0.0/16", "10.86.0.0/16"
#: The subnet that the controller manager assigns to the first node.
NODE_SUBNET = "10.86.0.0/24"
DNS_ADDRESS = "10.96.0.10"  # the usual address of the Service of DNS
API_SERVER = f"https://{NODE_ADDRESS}:6443"
ETCD = "http://127.0.0.1:2379"
DOMAIN = "cluster.local"
SOCKET = "/run/infranetes/infranetes.sock"
#: The files that the quick start puts into a node's /etc.
QUICK_START = ROOT / "docs" / "quick-start" / "etc"
METRICS_PORT = 9475
KUBELET_DIRECTORY = "/var/lib/kubelet"
INFRANETES, CONTAINERD, MIXED = "infranetes", "containerd", "mixed"
#: kubelet's runtimes: with these every pod is a VM; none is, for comparison; those of a RuntimeClass are.
RUNTIMES = (INFRANETES, CONTAINERD, MIXED)
#: The user as whom commands that come by ssh run.
SSH_USER = "root"
#: Stands for a provider's name, and selects simulated VMs that behave like a cloud's.
CLOUD = "cloud"
#: Containers' logs are rotated at this size, which is small so that tests see it happen.
LOG_BYTES = 128 << 10
_EVICTION_MIB = 64  # pods are evicted when the node has less memory left
_RESERVED_MIB = 512
#: kubelet's configuration by which Guaranteed pods have processors and memory nodes of their own.
PINNING: Mapping[str, object] = {
    "cpuManagerPolicy": "static",
    "reservedSystemCPUs": "0",
    "memoryManagerPolicy": "Static",
    "kubeReserved": {"memory": f"{_RESERVED_MIB}Mi"},
    # kubelet insists on the sum of what it reserves and where it evicts.
    "reservedMemory": [{"numaNode": 0, "limits": {"memory": f"{_RESERVED_MIB + _EVICTION_MIB}Mi"}}],
}


@attrs.frozen
class Program:
    """A process of the cluster. `restarted`: whether it is started again when it ends, as by systemd."""

    name: str
    command: Sequence[str]
    restarted: bool = False


def _flags(program: str, **values: object) -> list[str]:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    return [str(PROGRAMS / program), *flags]


def etcd(place: Path) -> Program:
    """Return etcd, without fsync, because its data is worthless after the cluster's end."""
    # This flag of etcd's takes no value.
    return Program("etcd", [*_flags("etcd", data_dir=place / "etcd"), "--unsafe-no-fsync"])


def api_server(ca: Authority) -> Program:
    names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", f"kubernetes.default.svc.{DOMAIN}"]
    certificate, key = ca.issue("kube-apiserver", names=[*names, NODE_ADDRESS, "10.96.0.1", "127.0.0.1"])
    to_kubelet, to_kubelet_key = ca.issue("kube-apiserver-kubelet-client", ["system:masters"])
    aggregator, aggregator_key = ca.issue("front-proxy")
    private, public = ca.signing_key("service-accounts")
    command = _flags(
        "kube-apiserver",
        etcd_servers=ETCD,
        advertise_address=NODE_ADDRESS,
        service_cluster_ip_range=SERVICES,
        authorization_mode="Node,RBAC",
        client_ca_file=ca.certificate,
        requestheader_client_ca_file=ca.certificate,
        requestheader_allowed_names="front-proxy",
        requestheader_username_headers="X-Remote-User",
        requestheader_group_headers="X-Remote-Group",
        requestheader_extra_headers_prefix="X-Remote-Extra-",
        proxy_client_cert_file=aggregator,
        proxy_client_key_file=aggregator_key,
        enable_aggregator_routing="true",  # straight to endpoints: only pods reach Services' addresses
        tls_cert_file=certificate,
        tls_private_key_file=key,
        kubelet_client_certificate=to_kubelet,
        kubelet_client_key=to_kubelet_key,
        kubelet_certificate_authority=ca.certificate,
        kubelet_preferred_address_types="InternalIP",
        service_account_issuer=f"https://kubernetes.default.svc.{DOMAIN}",
        service_account_signing_key_file=private,
        service_account_key_file=public,
        allow_privileged="true",
    )
    return Program("kube-apiserver", command)


def controller_manager(ca: Authority) -> Program:
    config = ca.kubeconfig("system:kube-controller-manager", API_SERVER)
    command = _flags(
        "kube-controller-manager",
        kubeconfig=config,
        authentication_kubeconfig=config,
        authorization_kubeconfig=config,
        cert_dir=ca.directory,
        use_service_account_credentials="true",
        service_account_private_key_file=ca.directory / "service-accounts.key",
        root_ca_file=ca.certificate,
        allocate_node_cidrs="true",
        cluster_cidr=PODS,
        service_cluster_ip_range=SERVICES,
        leader_elect="false",
    )
    return Program("kube-controller-manager", command)


def scheduler(ca: Authority) -> Program:
    config = ca.kubeconfig("system:kube-scheduler", API_SERVER)
    command = _flags(
        "kube-scheduler",
        kubeconfig=config,
        authentication_kubeconfig=config,
        authorization_kubeconfig=config,
        leader_elect="false",
    )
    return Program("kube-scheduler", command)


def proxy(user: Path, node: Node) -> Program:
    """Return a node's kube-proxy. :param user: the path of its kubeconfig."""
    config = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clusterCIDR": PODS,
        "hostnameOverride": node.name,
        "clientConnection": {"kubeconfig": str(user)},
        "oomScoreAdj": 0,
        # These settings are the whole machine's and not those of one network namespace, so they stay.
        "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }
    path = _written(node.place / "kube-proxy.json", config)
    return Program("kube-proxy", _flags("kube-proxy", config=path))


def dns(place: Path, kubeconfig: Path) -> Program:
    path = place / "Corefile"
    path.write_text(f"""\
.:53 {{
    bind {NODE_ADDRESS}
    errors
    ready 127.0.0.1:8181
    kubernetes {DOMAIN} in-addr.arpa {{
        kubeconfig {kubeconfig}
        pods insecure
    }}
}}
""")
    return Program("coredns", [str(PROGRAMS / "coredns"), "-conf", str(path)])


def logind(paths: Paths) -> Program:
    """Return the logind that tells the first node's kubelet when its machine is about to be switched off."""
    return Program("logind", [sys.executable, "-m", "tests.cluster.logind", paths.name])


def sshd(paths: Paths) -> Program:
    """Return the sshd by which Kubernetes' suite stops and starts the first node's kubelet."""
    return Program("sshd", [sys.executable, "-m", "tests.cluster.sshd", paths.name])


def kubelet(
    ca: Authority,
    node: Node,
    cgroup: str,
    socket: str | Path = SOCKET,
    changes: Mapping[str, object] = MappingProxyType({}),
) -> Program:
    """Return a node's kubelet.

    :param cgroup: the control group in which pods get theirs; empty: they get none.
    :param socket: the runtime's socket.
    :param changes: to its configuration."""
    certificate, key = ca.issue(f"kubelet-server-{node.name}", names=[node.name, node.address])
    (node.place / "resolv.conf").touch()
    _install_flex_volumes(node.place / "volume-plugins")
    config: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": node.address,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(ca.certificate)},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(certificate),
        "tlsPrivateKeyFile": str(key),
        "containerRuntimeEndpoint": f"unix://{socket}",
        "clusterDNS": [DNS_ADDRESS],
        "clusterDomain": DOMAIN,
        "resolvConf": str(node.place / "resolv.conf"),
        "volumePluginDir": str(node.place / "volume-plugins"),
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,
        "serializeImagePulls": False,
        "containerLogMaxSize": str(LOG_BYTES),
        "containerLogMonitorInterval": "3s",
        "syncFrequency": "10s",
        # Critical pods, which are ended after the others, get the part of the period that the next line sets.
        "shutdownGracePeriod": "160s",
        "shutdownGracePeriodCriticalPods": "60s",
        # Tests should not depend on how full the machine's disk is.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "evictionHard": {
            "memory.available": f"{_EVICTION_MIB}Mi",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
        },
    }
    if cgroup:
        config["cgroupRoot"] = f"/{cgroup}"
    else:
        config |= {"cgroupsPerQOS": False, "enforceNodeAllocatable": []}
    if not os.access("/dev/kmsg", os.R_OK):
        config["featureGates"] = {"KubeletInUserNamespace": True}
    path = _written(node.place / "kubelet.json", {**config, **changes})
    user = ca.kubeconfig(f"system:node:{node.name}", API_SERVER, ["system:nodes"])
    command = _flags(
        "kubelet", config=path, kubeconfig=user, hostname_override=node.name, node_ip=node.address
    )
    if node.first:
        command = ["env", f"DBUS_SYSTEM_BUS_ADDRESS=unix:path={node.cluster.system_bus}", *command]
    return Program("kubelet", command, restarted=True)


def _install_flex_volumes(directory: Path) -> None:
    """Install our FlexVolume driver there, as the package does in kubelet's default directory."""
    driver = directory / "infranetes.io~volume" / "volume"
    driver.parent.mkdir(parents=True, exist_ok=True)
    driver.write_text(f'#!/bin/sh\nexec {Path(sys.executable).with_name("infranetes-flexvolume")} "$@"\n')
    driver.chmod(0o755)


def dns_service() -> Sequence[Mapping[str, Any]]:
    """Return the manifests of the Service of `dns` and of its endpoint."""
    about = {"namespace": "kube-system", "name": "kube-dns"}
    ports = [{"name": name, "protocol": name.upper(), "port": 53} for name in ("udp", "tcp")]
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": about,
            "spec": {"clusterIP": DNS_ADDRESS, "ports": ports},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {**about, "labels": {"kubernetes.io/service-name": "kube-dns"}},
            "addressType": "IPv4",
            "ports": ports,
            "endpoints": [{"addresses": [NODE_ADDRESS]}],
        },
    ]


def daemon(ca: Authority, node: Node, kubernetes: Mapping[str, Any], changes: Mapping[str, Any]) -> Program:
    """Return our daemon, configured by default except for the cluster, the registry and `changes`.

    :param kubernetes: its table `kubernetes`: what it does for the cluster, and knows about it."""
    user = ca.kubeconfig(f"system:node:{node.name}", API_SERVER, ["system:nodes"])
    certificate, key = ca.issue(f"infranetes-{node.name}", names=[node.name, node.address])
    registries = node.place / "registries.conf"
    registries.write_text(images.registries_conf())
    config: dict[str, Any] = {
        "cgroup_driver": "cgroupfs",
        "node": node.name,
        "kubernetes": {"kubeconfig": str(user), **kubernetes},
        "metrics": {
            "listen": f"{node.address}:{METRICS_PORT}",
            "certificate_file": str(certificate),
            "key_file": str(key),
            "kubectl_audience": "infranetes",
        },
        "log": {"level": "debug"},
        "images": {"registries_conf": str(registries), "preload": [f"{images.PREFIX}/{images.BUSYBOX}"]},
        "volumes": {"keep_free": 0.02, "flexvolumes": ["*"]},  # above the limits that kubelet has
        **changes,
    }
    path = node.place / "infranetes.toml"
    path.write_text(toml(config))
    twistd = [sys.executable, "-c", "from twisted.scripts.twistd import run; run()"]
    command = [*twistd, "--nodaemon", "--pidfile=", "infranetes", "--config", str(path)]
    return Program("infranetes", command, restarted=True)


def rights(page: str, count: int | None = None) -> str:
    """Return the manifests of a page of the docs, verbatim: the first `count`, or all."""
    found = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.M | re.S)
    return "---\n".join(found[:count])


def vms_by_default() -> Mapping[str, Any]:
    """Return a binding of the policy of docs/runtime-classes.md to all namespaces but the cluster's own."""
    name = "infranetes-default"
    system = {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["kube-system"]}
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingAdmissionPolicyBinding",
        "metadata": {"name": f"{name}-everywhere"},
        "spec": {
            "policyName": name,
            "matchResources": {"namespaceSelector": {"matchExpressions": [system]}},
        },
    }


def beside(socket: Path) -> Mapping[str, Any]:
    """Return the quick start's configuration of the daemon, with the socket of this node's containerd."""
    file = QUICK_START / "infranetes/infranetes.toml.d/10-cluster.toml"
    found = tomllib.loads(file.read_text())
    return {**found, "delegate": {**found["delegate"], "socket": str(socket)}}


def provider(name: str, cgroup: str) -> Mapping[str, Any]:
    """Return the daemon's configuration of the provider.

    :param cgroup: the control group below which VMs that are local processes have theirs."""
    if name == "qemu":
        return {"provider": name, "csi": {"kubelet_dir": KUBELET_DIRECTORY}}
    if name != CLOUD:
        return {"provider": name}
    machines = {"machines": "namespaces", "cgroup": f"{cgroup}/machines", "keep_layers": True}
    return {"provider": "simulated", "providers": {"simulated": machines}}


def _written(path: Path, document: Mapping[str, Any]) -> Path:
    path.write_text(json.dumps(document, indent=2))
    return path
