# SPDX-License-Identifier: Apache-2.0
"""From nothing to a VM pod by docs/install-cluster.md alone, and back to a node as it was."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from twisted.trial.unittest import SynchronousTestCase

from infranetes.installer.cluster import VMS
from tests.chart.control_plane import ControlPlane
from tests.chart.node import NAME, KubeadmNode
from tests.cluster.case import until
from tests.contrib.rendered import CHART, NAMESPACE, TREE
from tests.e2e import cleanroot, node_image, node_state, roots
from tests.harness.durations import slow
from tests.support.disk_space import Scratch

MINUTES = 60.0
#: To a configuration.
CHANGE = '\n[log]\nlevel = "debug"\n'
#: Of the chart's kinds.
OBJECTS = "runtimeclasses,validatingadmissionpolicies,clusterroles,serviceaccounts,configmaps,daemonsets,jobs"
#: What containerd, kubelet and kube-proxy change by themselves, with each pod.
CHANGING = (
    "var/lib/containerd",
    "var/lib/cni",
    "var/lib/kubelet/pods",
    "var/lib/kubelet/plugins",
    "var/lib/kubelet/plugins_registry",
    "var/lib/kubelet/device-plugins",
    "var/lib/kubelet/image_manager",
    "var/lib/kubelet/actuated_pods_state",
    "var/lib/kubelet/allocated_pods_state",
)


def documented(page: str, beginning: str) -> Sequence[Sequence[str]]:
    """Return the commands of the block of a page that begins with these words."""
    text = (TREE / "docs" / page).read_text()
    (block,) = (
        each for each in re.findall(r"(?:^    .+\n)+", text, flags=re.M) if each.strip().startswith(beginning)
    )
    return [shlex.split(line) for line in block.replace("\\\n", " ").splitlines()]


class ChartCase(SynchronousTestCase):
    """A cluster of one node, with a pod of its containerd.

    :cvar proxy: kube-proxy's mode. :cvar newer: whether that has sets that Debian 12's nft can't read.
    """

    proxy = "iptables"
    newer = False

    def setUp(self) -> None:
        place = Scratch.make("chart")
        self.addCleanup(place.remove)
        self.plane = ControlPlane(place.path)
        self.addCleanup(self.plane.end)
        self.plane.start(node_image.with_guest())
        root = cleanroot.CleanRoot(roots.KUBEADM.tar())
        self.addCleanup(root.remove)
        self.node = KubeadmNode(root, self.plane, self.proxy)
        self.node.boot()
        self.addCleanup(self.node.end)
        for what in (f"node/{NAME}", "serviceaccount/default"):
            self.wait_for(what)
        self.wait(f"node/{NAME}", "condition=Ready", 5 * MINUTES)
        self.run_pod("plain")

    def kubectl(self, *words: str, seconds: float = 2 * MINUTES) -> str:
        """Run kubectl, which has to succeed; return its output."""
        return self._said(self.plane.kubectl(*words, timeout=seconds), words)

    def helm(self, *words: str, seconds: float) -> str:
        """Run helm, which has to succeed; return its output."""
        return self._said(self.plane.helm(*words, timeout=seconds), words)

    def _said(self, done: subprocess.CompletedProcess[str], words: Sequence[str]) -> str:
        if done.returncode:
            self.fail(f"{' '.join(words)}: {done.stdout}\n{self.story()}")
        return done.stdout

    def story(self) -> str:
        """Return what the cluster and the node say of themselves."""
        asked = (("get", "pods,nodes,jobs", "-A", "-o", "wide"), ("get", "events", "-A"))
        logs = ("logs", "-n", NAMESPACE, "daemonset/infranetes-installer", "--tail=40")
        said = [self.plane.kubectl(*words).stdout[-6000:] for words in (*asked, logs)]
        return "\n".join([*said, self.node.journal("infranetes")[-8000:]])

    def wait_for(self, what: str) -> None:
        """Wait until there is an object."""
        until(lambda: self.plane.kubectl("get", what).returncode == 0, f"there is {what}", 3 * MINUTES)

    def wait(self, what: str, condition: str, seconds: float) -> None:
        self.kubectl("wait", what, f"--for={condition}", f"--timeout={seconds:.0f}s", seconds=seconds + 30)

    def get(self, *words: str) -> Any:
        return json.loads(self.kubectl("get", *words, "--output=json"))

    def run_pod(self, name: str, **spec: object) -> None:
        """Run a pod until it is deleted; return when it is ready."""
        overrides = json.dumps({"spec": {"terminationGracePeriodSeconds": 1, **spec}})
        image = "registry.k8s.io/e2e-test-images/busybox:1.36.1-1"
        words = ("run", name, f"--image={image}", "--restart=Never", f"--overrides={overrides}")
        self.kubectl(*words, "--command", "--", "sleep", "2147483647")
        self.wait(f"pod/{name}", "condition=Ready", 10 * MINUTES)

    def state(self) -> set[str]:
        """Return all that the node is."""
        ruleset = self.node.system.run("nft", "list", "ruleset").stdout
        found = node_state.of(self.node.system, self.node.root.path, CHANGING)
        return found | {f"table: {line}" for line in node_state.tables(ruleset)}


@slow(900, "a cluster is started, and an emulated VM by it")
class ChartTests(ChartCase):
    timeout = 3600

    def follow(self, commands: Sequence[Sequence[str]]) -> None:
        """Do what a page says."""
        for command in commands:
            program, *words = [word.replace("NODE", NAME) for word in command]
            words = [word.replace("contrib/helm", str(TREE / "contrib/helm")) for word in words]
            run = self.helm if program == "helm" else self.kubectl
            said = run(*words, seconds=30 * MINUTES)
            print(f"$ {' '.join(command)}\n{said}", flush=True)

    def change_configuration_and_back(self) -> None:
        """Have helm upgrade, and roll back, under a VM that runs on."""
        before = self.get("pod", "vm")["status"]["containerStatuses"]
        file = Path(self.mktemp()).absolute()
        file.write_text(yaml.safe_load((CHART / "values.yaml").read_text())["config"] + CHANGE)
        release = ("infranetes", "--namespace", NAMESPACE)
        configured = self.node.system.path("etc/infranetes/infranetes.toml")
        upgrade = ("upgrade", *release, str(CHART), "--reuse-values", f"--set-file=config={file}")
        for command, changed in ((upgrade, True), (("rollback", *release, "1"), False)):
            self.helm(*command, seconds=2 * MINUTES)
            installer = ("daemonset/infranetes-installer", "--namespace", NAMESPACE)
            self.kubectl("rollout", "status", *installer, "--timeout=10m", seconds=11 * MINUTES)
            self.assertEqual(configured.read_text().endswith(CHANGE), changed)
            self.assertEqual(self.get("pod", "vm")["status"]["containerStatuses"], before)

    def test_a_vm_pod_by_the_page_alone_and_a_node_as_before(self) -> None:
        before = self.state()
        plain = self.get("pod", "plain")["status"]["containerStatuses"]
        self.follow(documented("install-cluster.md", "helm install"))
        self.run_pod("vm", runtimeClassName="infranetes")
        self.change_configuration_and_back()
        kernel = self.kubectl("exec", "vm", "--", "uname", "-r")
        self.assertNotEqual(kernel.strip(), self.node.system.run("uname", "-r").stdout.strip())
        self.assertEqual(self.get("pod", "plain")["status"]["containerStatuses"], plain)
        self.assertEqual(self.node.system.path("run/infranetes/newer-nft").exists(), self.newer)
        self.kubectl("delete", "pod", "vm")
        self.helm("uninstall", "infranetes", "--namespace", NAMESPACE, "--timeout=30m", seconds=31 * MINUTES)
        self.assertEqual(self.get("pod", "plain")["status"]["containerStatuses"], plain)
        self.assertNotIn(VMS, self.get("node", NAME)["metadata"]["labels"])
        left = self.get(OBJECTS, "--all-namespaces", "--selector=app.kubernetes.io/name=infranetes")
        self.assertEqual(left["items"], [])
        after = self.state()
        self.assertEqual((sorted(before - after), sorted(after - before)), ([], []))
        self.run_pod("later")


class NftablesTests(ChartTests):
    """The same where kube-proxy has sets, made by a newer nft than the daemon's."""

    proxy = "nftables"
    newer = True
