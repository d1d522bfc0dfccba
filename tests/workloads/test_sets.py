# SPDX-License-Identifier: Apache-2.0
"""A StatefulSet's pods have an order, names and data that stay; a DaemonSet's are on each node."""

from __future__ import annotations

import itertools
from pathlib import Path

from tests.cluster.case import Manifest, container, host_path, pod, until
from tests.workloads.case import (
    IDLE,
    PORT,
    SERVE,
    WorkloadCase,
    controlled,
    moment,
    server,
    service,
    started,
)


class StatefulSetTests(WorkloadCase):
    def stateful_set(self, replicas: int) -> Manifest:
        claim = {
            "metadata": {"name": "data"},
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "storageClassName": self.namespace,
                "resources": {"requests": {"storage": "1Mi"}},
            },
        }
        mounts = [{"name": "data", "mountPath": "/data"}]
        return controlled(
            "StatefulSet", "db", server("$(hostname)", volumeMounts=mounts),
            replicas=replicas,
            serviceName="db",
            volumeClaimTemplates=[claim],
        )  # fmt: skip

    def volume(self, number: int, path: Path) -> Manifest:
        """One that only claims of this test have."""
        name = f"{self.namespace}-{number}"
        self.addCleanup(self.kubectl, "delete", "persistentvolume", name, "--wait=false")
        return {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": {
                "capacity": {"storage": "1Mi"},
                "accessModes": ["ReadWriteOnce"],
                "storageClassName": self.namespace,
                "hostPath": {"path": str(path)},
            },
        }

    def test_pods_have_an_order_names_and_data(self) -> None:
        self.apply(*[self.volume(number, self.directory()) for number in range(3)])
        headless = service("db", clusterIP="None")
        self.apply(headless, self.stateful_set(3), pod("client", container("client", IDLE)))
        self.rolled_out("statefulset/db")
        names = ["db-0", "db-1", "db-2"]
        self.assertEqual(self.names("db"), names)
        for earlier, later in itertools.pairwise(self.pods("db")):
            self.assertLessEqual(started(earlier), moment(later["metadata"]["creationTimestamp"]))
        self.wait_until_ready("client")
        for name in names:
            self.assertEqual(self.run_in(name, f"echo of {name} > /data/own; hostname"), f"{name}\n")
            self.until_said("client", f"wget -q -O - http://{name}.db:{PORT}/", name)
        self.one_is_replaced()
        self.scaled_down()

    def one_is_replaced(self) -> None:
        """Another pod of the same name is found by that name, and has the data."""
        first = self.get("pod", "db-1")
        self.here("delete", "pod", "db-1", "--timeout=100s", timeout=120)
        self.rolled_out("statefulset/db")
        second = self.get("pod", "db-1")
        self.assertNotEqual(first["metadata"]["uid"], second["metadata"]["uid"])
        self.assertEqual(self.run_in("db-1", "cat /data/own"), "of db-1\n")
        self.until_said("client", f"wget -q -O - http://db-1.db:{PORT}/", "db-1")

    def scaled_down(self) -> None:
        """The last is the first to go."""
        self.here("scale", "statefulset/db", "--replicas=1")
        seen: list[list[str]] = [self.names("db")]

        def one_left() -> bool:
            now = self.names("db")
            if now != seen[-1]:
                seen.append(now)
            return now == ["db-0"]

        until(one_left, "one pod is left", 120)
        allowed = [["db-0", "db-1", "db-2"], ["db-0", "db-1"], ["db-0"]]
        self.assertTrue(all(each in allowed for each in seen), seen)


class DaemonSetTests(WorkloadCase):
    def test_one_with_host_network_runs_on_each_node(self) -> None:
        port = 18080
        script = SERVE.format(page="$NODE").replace("8080", str(port))
        agent = container(
            "main", script,
            ports=[{"containerPort": port, "hostPort": port}],
            readinessProbe={"httpGet": {"port": port}, "periodSeconds": 1, "timeoutSeconds": 10},
            env=[{"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
            volumeMounts=[{"name": "said", "mountPath": "/said"}],
        )  # fmt: skip
        volumes = [host_path("said", self.directory())]
        pods = {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet", "volumes": volumes}
        everywhere = [{"operator": "Exists"}]
        self.apply(controlled("DaemonSet", "agent", agent, pods={**pods, "tolerations": everywhere}))
        self.rolled_out("daemonset/agent")
        found = self.pods("agent")
        self.assertEqual(sorted(each["spec"]["nodeName"] for each in found), sorted(self.nodes()))
        for each in found:
            node = each["spec"]["nodeName"]
            self.assertEqual(self.run_in(each["metadata"]["name"], "hostname"), f"{node}\n")
        self.apply(pod("client", container("client", IDLE)))
        self.wait_until_ready("client")
        for each in found:
            address = each["status"]["hostIP"]
            self.until_said("client", f"wget -q -O - http://{address}:{port}/", each["spec"]["nodeName"])
