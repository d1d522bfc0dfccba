# SPDX-License-Identifier: Apache-2.0
"""A Deployment grows and shrinks with its load, as metrics-server sees it."""

from __future__ import annotations

import json
import shlex

from tests.cluster.case import container, until
from tests.cluster.components import NODE_ADDRESS
from tests.cluster.paths import PROGRAMS
from tests.workloads.case import WorkloadCase, controlled

METRICS_SERVER = PROGRAMS / "metrics-server"
PORT = 4443
# It is busy while /tmp/busy exists. Otherwise it runs next to no programs, because in a VM without KVM their
# processor time counts the more, the less of the processors the VM gets: its kernel takes all time for its
# own.
BUSY = "trap 'exit 0' TERM; while true; do [ -e /tmp/busy ] || { sleep 10 & wait $!; }; done"
SCALE_SECONDS = 300


def api(port: int) -> list[dict[str, object]]:
    """Return the manifests of the resource metrics API, served by a program on the node."""
    about = {"namespace": "kube-system", "name": "metrics-server"}
    ports = [{"name": "https", "protocol": "TCP", "port": port}]
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": about, "spec": {"ports": ports}},
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {**about, "labels": {"kubernetes.io/service-name": "metrics-server"}},
            "addressType": "IPv4",
            "ports": ports,
            "endpoints": [{"addresses": [NODE_ADDRESS]}],
        },
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": "v1beta1.metrics.k8s.io"},
            "spec": {
                "group": "metrics.k8s.io",
                "version": "v1beta1",
                "service": {**about, "port": port},
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
                "insecureSkipTLSVerify": True,
            },
        },
    ]


def autoscaler(name: str, most: int) -> dict[str, object]:
    """Return an autoscaler of a Deployment, by its processor time, which removes pods as soon as it may."""
    target = {"type": "Utilization", "averageUtilization": 50}
    at_once = {"stabilizationWindowSeconds": 0}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": name},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
            "minReplicas": 1,
            "maxReplicas": most,
            "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": target}}],
            "behavior": {"scaleDown": at_once, "scaleUp": at_once},
        },
    }


class AutoscalingTests(WorkloadCase):
    if not METRICS_SERVER.exists():
        skip = "metrics-server is made by `make workloads`"

    def start_metrics_server(self) -> None:
        """Start metrics-server on the node, until the test ends."""
        place = self.directory()
        admin = self.cluster.paths.place / "pki" / "admin.conf"
        command = [
            *(str(METRICS_SERVER), f"--secure-port={PORT}", f"--cert-dir={place}"),
            *(f"--{each}kubeconfig={admin}" for each in ("", "authentication-", "authorization-")),
            *("--kubelet-insecure-tls", "--kubelet-preferred-address-types=InternalIP"),
            "--metric-resolution=15s",
        ]
        log, pid = place / "log", place / "pid"
        run = f"exec {shlex.join(command)} >{log} 2>&1"
        self.cluster.inside("setsid", "--fork", "sh", "-c", f"echo $$ > {pid}; {run}")
        self.addCleanup(lambda: self.cluster.inside("sh", "-c", f"kill $(cat {pid})"))
        document = {"apiVersion": "v1", "kind": "List", "items": api(PORT)}
        given = json.dumps(document).encode()
        self.addCleanup(self.kubectl, "delete", "--filename", "-", given=given)
        self.kubectl("apply", "--filename", "-", given=given)
        available = ("--for=condition=Available", "--timeout=120s")
        self.kubectl("wait", "apiservice/v1beta1.metrics.k8s.io", *available, timeout=150)

    def millis(self) -> dict[str, int]:
        """Return each pod's thousandths of a processor, as `kubectl top` shows them."""
        done = self.cluster.kubectl("--namespace", self.namespace, "top", "pods", "--no-headers")
        lines = [line.split() for line in done.stdout.decode().splitlines()]
        return {name: int(cpu.removesuffix("m")) for name, cpu, *_ in lines}

    def nodes_have_figures(self) -> None:
        """Assert that each node shows at least the processor and memory usage that its pods show."""
        lines = self.kubectl("top", "nodes", "--no-headers").splitlines()
        found = {name: (cpu, memory) for name, cpu, _, memory, _ in map(str.split, lines)}
        self.assertEqual(sorted(found), sorted(self.nodes()))
        cpu, memory = found[self.get("pods")["items"][0]["spec"]["nodeName"]]
        self.assertGreater(int(cpu.removesuffix("m")), 150)
        self.assertGreater(int(memory.removesuffix("Mi")), 64)

    def replicas(self) -> int:
        """Return the number of replicas that the Deployment is to have."""
        return int(self.get("deployment", "worker")["spec"]["replicas"])

    def test_a_deployment_grows_and_shrinks_with_its_load(self) -> None:
        resources = {"requests": {"cpu": "200m"}, "limits": {"cpu": "300m"}}
        self.apply(controlled("Deployment", "worker", container("main", BUSY, resources=resources)))
        self.start_metrics_server()
        self.rolled_out("deployment/worker")
        (first,) = self.names("worker")
        until(lambda: first in self.millis(), "the pod has figures", 120)
        self.apply(autoscaler("worker", 3))
        self.run_in(first, "touch /tmp/busy")
        until(lambda: self.replicas() == 3, "there are three", SCALE_SECONDS)
        self.assertGreater(self.millis()[first], 150)
        self.nodes_have_figures()
        self.rolled_out("deployment/worker")
        for name in self.names("worker"):
            self.run_in(name, "rm -f /tmp/busy")
        until(lambda: self.replicas() == 1, "there is one", SCALE_SECONDS)
        until(lambda: len(self.names("worker")) == 1, "the others are gone", 60)
