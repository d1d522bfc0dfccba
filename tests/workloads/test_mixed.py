# SPDX-License-Identifier: Apache-2.0
"""A node with both kinds of pods: the quick start's pod; either runtime killed, and neither's pods lost."""

from __future__ import annotations

import os
from collections import Counter
from ipaddress import ip_address, ip_network
from pathlib import Path

from tests.cluster.case import container, host_path, states, until
from tests.cluster.components import NODE_SUBNET
from tests.cluster.paths import ROOT
from tests.workloads.mixed import MixedCase, in_a_vm, on_the_node

#: Each run of a container leaves a file of its own on the node.
RECORD = "echo > /runs/{}.$(cat /proc/sys/kernel/random/uuid)"
COUNT = "i=0; while true; do echo $i; i=$((i+1)); sleep 0.2; done"
KILLED = (("containerd",), ("infranetes",), ("containerd", "infranetes"))
KINDS = {"vm": in_a_vm, "runc": on_the_node}
LINES = 10


class QuickStartTests(MixedCase):
    """The pod of the quick start. The node has the quick start's delegate, handler and CNI network."""

    def test_it_runs_and_its_log_shows_the_vms_kernel(self) -> None:
        own = self.cluster.paths.place / "runtime-classes.yaml"
        self.addCleanup(self.kubectl, "apply", "--filename", str(own))
        self.here("apply", "--filename", str(ROOT / "docs/quick-start/hello.yaml"))
        found = self.wait_until_ready("hello")
        until(lambda: self.logs("hello"), "it has written its line", 60)
        words = self.logs("hello").split()
        self.assertEqual(words[:2], ["Linux", "hello"])
        self.assertNotEqual(words[2], os.uname().release)
        (pod,) = self.pods_of_the_daemon()
        self.assertEqual((pod["name"], pod["state"]), ("hello", "ready"))
        self.assertEqual(pod["vm"]["address"], found["status"]["podIP"])
        self.assertIn(ip_address(found["status"]["podIP"]), ip_network(NODE_SUBNET))


class KilledTests(MixedCase):
    def setUp(self) -> None:
        super().setUp()
        self.runs = self.directory()

    def make(self, kind: str, name: str, script: str, **spec: object) -> None:
        """Make a pod of that kind whose containers record that they run."""
        mounts = [{"name": "runs", "mountPath": "/runs"}]
        box = container("main", f"{RECORD.format(name)}; {script}", volumeMounts=mounts)
        self.apply(KINDS[kind](name, box, volumes=[host_path("runs", self.runs)], **spec))

    def ran(self) -> Counter[str]:
        """Return how often a container of each pod has been started."""
        return Counter(Path(each).stem for each in self.runs.iterdir())

    def goes_on(self, name: str) -> None:
        """Wait for more lines in its log."""
        seen = len(self.logs(name).split())
        until(lambda: len(self.logs(name).split()) >= seen + LINES, f"{name} goes on", 60)

    def test_no_pod_is_lost_and_no_container_runs_twice(self) -> None:
        for kind in KINDS:
            self.make(kind, f"steady-{kind}", COUNT, restartPolicy="Always")
        steady = {f"steady-{kind}": self.wait_until_ready(f"steady-{kind}") for kind in KINDS}
        expected = Counter(steady.keys())
        for programs in KILLED:
            made = [f"{'-'.join((*programs, kind))}" for kind in KINDS]
            for kind, name in zip(KINDS, made, strict=True):
                self.make(kind, name, "echo once")
            self.cluster.restart(*programs)
            for name in made:
                done = self.wait_for_phase(name, "Succeeded")
                self.assertEqual(states(done)["main"]["restartCount"], 0, name)
                self.assertEqual(self.logs(name), "once\n")
            expected.update(made)
            for name, found in steady.items():
                self.goes_on(name)
                self.assertEqual(self.execute(name, "echo", "alive").stdout, b"alive\n")
                self.assert_same_run(found)
        # Only the VM's log: that of containerd's pod may lack what containerd had read when it was killed.
        lines = self.logs("steady-vm").split()
        self.assertEqual(lines, [str(number) for number in range(len(lines))])
        until(lambda: self.ran() >= expected, "what VMs have written is on the node", 60)
        self.assertEqual(self.ran(), expected)
        self.here("delete", "pods", "--all", timeout=180)
        until(self.nothing_left, "nothing of them is left", 180)  # kubelet removes sandboxes once a minute

    def nothing_left(self) -> bool:
        """Return whether neither runtime has anything left of this test's pods, including shadows."""
        return not self.sandboxes_of_containerd() and not self.pods_of_the_daemon()
