# SPDX-License-Identifier: Apache-2.0
"""A cluster leaves nothing behind, however it ends."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.cluster import remains
from tests.cluster.case import Cluster, container, pod, until
from tests.cluster.remains import Namespaces
from tests.cluster.world import KERNEL, links

BRIDGES = ("infranetes0", "node0")


def of_the_machine() -> dict[str, object]:
    """Return what the cluster has in its namespaces and must not change here: links, tables, settings."""
    tables = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True).stdout
    return {
        "links": [name for name in links() if name in BRIDGES],
        "tables": [line for line in tables.splitlines() if line.endswith(BRIDGES)],
        "kernel": {name: Path("/proc/sys", name).read_text() for name in KERNEL},
    }


class EndTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.before = of_the_machine()

    def prepare(self, provider: str) -> None:
        self.cluster = Cluster("end", "--provider", provider)
        self.paths = self.cluster.paths
        self.addCleanup(self.cluster.stop)

    def held(self) -> Namespaces:
        """Return the running cluster's namespaces, held so that no process in them is missed later."""
        first = until(self.first, "the cluster has a process 1", 60)
        held = Namespaces(first)
        self.addCleanup(held.__exit__)
        self.assertNotEqual(held.processes(), [])
        return held

    def first(self) -> int:
        try:
            return int(json.loads((self.paths.place / "first").read_text())[0])
        except (OSError, ValueError):
            return 0

    def run_pod(self) -> None:
        """Run a pod, so that there are a VM and mounts of kubelet's."""
        account = ("get", "serviceaccount", "default")
        until(lambda: self.cluster.kubectl(*account).returncode == 0, "there can be pods", 30)
        manifest = json.dumps(pod("one", container("main", "exec sleep 1000")))
        done = self.cluster.kubectl("apply", "--filename", "-", given=manifest.encode())
        self.assertEqual(done.returncode, 0, done.stderr)
        done = self.cluster.kubectl("wait", "pod/one", "--for=condition=Ready", "--timeout=100s")
        self.assertEqual(done.returncode, 0, done.stderr)

    def assertNothingIsLeft(self, held: Namespaces) -> None:
        self.assertEqual(held.processes() + held.mounts(), [])
        self.assertEqual(remains.found(self.paths), [])
        self.assertEqual(of_the_machine(), self.before)

    def test_after_ctrl_c_with_a_vm_that_runs(self) -> None:
        self.prepare("qemu")
        self.cluster.start().wait_until_ready()
        held = self.held()
        self.run_pod()
        self.cluster.inside("pgrep", "-f", "guest=infranetes-")
        self.cluster.signal(signal.SIGINT)
        self.cluster.wait_until_ended()
        self.assertNothingIsLeft(held)
        self.assertNotIn("left behind", self.cluster.output)

    def test_after_sigterm_while_it_starts(self) -> None:
        self.prepare("simulated")
        self.cluster.start()
        held = self.held()
        until(lambda: "etcd answers" in self.cluster.output, "it is starting", 60)
        self.cluster.signal(signal.SIGTERM)
        self.cluster.wait_until_ended()
        self.assertNothingIsLeft(held)

    def test_after_sigkill_its_processes_die_and_the_next_one_clears_up(self) -> None:
        self.prepare("cloud")
        self.cluster.start().wait_until_ready()
        held = self.held()
        self.run_pod()
        self.cluster.signal(signal.SIGKILL)
        self.cluster.wait_until_ended()
        until(lambda: not held.processes(), "all processes are gone", 20)
        self.assertEqual(held.mounts(), [])
        self.assertNotEqual(remains.found(self.paths), [])
        self.cluster.start().wait_until_ready()
        held = self.held()
        self.cluster.kill("etcd")  # when a program ends, so does the cluster, with a message that names it
        self.cluster.wait_until_ended()
        self.assertIn("The cluster has failed: etcd ended with -9", self.cluster.output)
        self.assertNothingIsLeft(held)
