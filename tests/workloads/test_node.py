# SPDX-License-Identifier: Apache-2.0
"""Pods on a node that is drained, and whose programs or machine are stopped and started again."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.cluster.case import Manifest, container, host_path, pod, states, until
from tests.workloads.case import IDLE, WorkloadCase, controlled, moment, server

DRAIN_SECONDS = 240
# Writes to a file of the node's when it is asked to end.
POLITE = "trap 'sleep 1; echo bye > /said/$(hostname); exit 0' TERM; while true; do sleep 0.2; done"
ENDED = 143  # a shell's exit code for SIGTERM; if all containers end with 0, a pod has Succeeded
# Records at its end that it was asked to end.
LAST_WORDS = (
    f"trap 'sleep {{seconds}}; echo bye; echo last words > /dev/termination-log; exit {ENDED}' TERM;"
    " echo ready; while true; do sleep 0.2; done"
)


def running(found: Manifest) -> Mapping[str, tuple[object, ...]]:
    """Return what distinguishes containers that went on from containers that were started again."""
    return {
        name: (each["containerID"], each["restartCount"], each["state"])
        for name, each in states(found).items()
    }


class DrainTests(WorkloadCase):
    def test_a_drained_node_has_its_pods_again_when_it_may(self) -> None:
        said = self.directory()
        polite = container("main", POLITE, volumeMounts=[{"name": "said", "mountPath": "/said"}])
        pods = {"volumes": [host_path("said", said)], "terminationGracePeriodSeconds": 60}
        agent = container("main", IDLE)
        self.apply(
            controlled("Deployment", "polite", polite, replicas=2, pods=pods),
            controlled("DaemonSet", "agent", agent, pods={"tolerations": [{"operator": "Exists"}]}),
        )
        self.rolled_out("deployment/polite")
        self.rolled_out("daemonset/agent")
        old, agents = self.names("polite"), {each["metadata"]["uid"] for each in self.pods("agent")}
        nodes = self.nodes()
        self.addCleanup(self.kubectl, "uncordon", *nodes)
        flags = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", f"--timeout={DRAIN_SECONDS}s")
        self.kubectl("drain", *nodes, *flags, timeout=DRAIN_SECONDS + 30)
        self.assertEqual(sorted(path.name for path in said.iterdir()), old)
        waiting = self.pods("polite")
        self.assertEqual([each["status"]["phase"] for each in waiting], ["Pending"] * 2)
        self.assertFalse(set(self.names("polite")) & set(old))
        self.assertEqual({each["metadata"]["uid"] for each in self.pods("agent")}, agents)
        self.kubectl("uncordon", *nodes)
        self.rolled_out("deployment/polite")


class KubeletTests(WorkloadCase):
    def test_a_kubelet_started_again_goes_on_with_its_pods(self) -> None:
        self.apply(
            controlled("Deployment", "web", server("hello")),
            pod("counting", container("main", "i=0; while true; do echo $i; i=$((i+1)); sleep 0.2; done")),
        )
        self.rolled_out("deployment/web")
        self.wait_until_ready("counting")
        (name,) = self.names("web")
        before = [running(self.get("pod", each)) for each in (name, "counting")]
        self.cluster.restart("kubelet")
        self.apply(pod("new", container("main", "echo new")))
        self.wait_for_phase("new", "Succeeded")
        self.assertEqual(self.logs("new"), "new\n")
        self.rolled_out("deployment/web")
        self.assertEqual([running(self.get("pod", each)) for each in (name, "counting")], before)
        lines = self.logs("counting").split()
        self.assertEqual(lines, [str(number) for number in range(len(lines))])


class NodeCase(WorkloadCase):
    """A test case that looks at the node itself, and not only at what the API server knows."""

    def ours(self) -> list[Manifest]:
        """Return the daemon's sandboxes of this test's pods."""
        listed = json.loads(self.cluster.inside("infranetes-ctl", "pods", "--json"))["pods"]
        return [each for each in listed if each["namespace"] == self.namespace]

    def vms(self) -> set[str]:
        """Return the VMs of this test's pods."""
        return {each["vm"]["id"] for each in self.ours() if each["vm"]}

    def machines(self) -> set[str]:
        """Return the VMs that run on the node, of any pods."""
        names = self.cluster.inside("sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'")
        return {f"qemu-{each}" for each in re.findall(r"^guest=infranetes-(\w+)", names, re.M)}


class ShutdownTests(NodeCase):
    """kubelet ends the node's pods when its machine is about to be switched off."""

    def polite(self, name: str, seconds: int, said: Path, **spec: Any) -> Manifest:
        """Return a pod that takes its time to end, and records its end."""
        before_end = {"preStop": {"exec": {"command": ["sh", "-c", f"echo > /said/{name}"]}}}
        main = container(
            "main", LAST_WORDS.format(seconds=seconds), lifecycle=before_end,
            volumeMounts=[{"name": "said", "mountPath": "/said"}],
        )  # fmt: skip
        return pod(name, main, volumes=[host_path("said", said)], terminationGracePeriodSeconds=50, **spec)

    def test_pods_end_gracefully_before_the_machine_does(self) -> None:
        said = self.directory()
        self.apply(
            controlled("Deployment", "web", container("main", IDLE)),
            self.polite("ordinary", 5, said),
            self.polite("critical", 1, said, priorityClassName="system-node-critical"),
        )
        self.rolled_out("deployment/web")
        self.wait_until_ready("ordinary")
        self.wait_until_ready("critical")
        (web,) = self.names("web")
        until(self.cluster.inhibitors, "kubelet keeps the machine from being switched off", 30)
        old = self.vms()
        self.addCleanup(self.wait, "node/node", "condition=Ready")
        self.addCleanup(self.cluster.prepare_for_shutdown, False)
        begun = time.monotonic()
        self.cluster.prepare_for_shutdown(True)
        until(lambda: not self.cluster.inhibitors(), "the machine may be switched off", 200)
        print(f"[could be switched off after {time.monotonic() - begun:.0f} s]", end=" ")
        until(lambda: not self.vms() & old and not self.machines() & old, "no VM is left", 30)
        first, last = (self.ended(name) for name in ("ordinary", "critical"))
        self.assertLess(moment(first["finishedAt"]), moment(last["finishedAt"]))
        until(lambda: len(list(said.iterdir())) == 2, "each pod's preStop has run", 30)
        self.cluster.prepare_for_shutdown(False)
        until(self.cluster.inhibitors, "kubelet keeps the machine from being switched off again", 30)
        self.wait("node/node", "condition=Ready")
        self.rolled_out("deployment/web")
        going_on = [each for each in self.pods("web") if each["status"]["phase"] == "Running"]
        self.assertEqual([each["metadata"]["name"] == web for each in going_on], [False])

    def ended(self, name: str) -> Manifest:
        """How the container of that pod has, once it is said that it did: in time, and telling of it."""
        found = self.wait_for_phase(name, "Failed", 60)
        self.assertEqual(found["status"]["reason"], "Terminated")
        self.assertIn("node shutdown", found["status"]["message"])
        targets = [each for each in found["status"]["conditions"] if each["type"] == "DisruptionTarget"]
        self.assertEqual([each["reason"] for each in targets], ["TerminationByKubelet"])
        terminated: Manifest = states(found)["main"]["state"]["terminated"]
        self.assertEqual((terminated["exitCode"], terminated["message"]), (ENDED, "last words\n"))
        self.assertEqual(self.logs(name), "ready\nbye\n")
        return terminated


class RebootTests(NodeCase):
    def test_pods_come_back_after_a_reboot_and_the_old_ones_are_gone(self) -> None:
        runs = self.directory()
        mounts = [{"name": "runs", "mountPath": "/runs"}]
        recorded = container(
            "main", f"echo > /runs/$(cat /proc/sys/kernel/random/uuid); {IDLE}", volumeMounts=mounts
        )
        once = container("main", "echo > /runs/once.$(cat /proc/sys/kernel/random/uuid)", volumeMounts=mounts)
        volumes = [host_path("runs", runs)]
        self.apply(
            controlled("Deployment", "web", recorded, replicas=2, pods={"volumes": volumes}),
            pod("done", once, volumes=volumes),
        )
        self.rolled_out("deployment/web")
        self.wait_for_phase("done", "Succeeded")
        pods = self.names("web")

        def starts() -> int:  # what is written in a VM is on the node some moments later
            return len([path for path in runs.iterdir() if not path.name.startswith("once")])

        until(lambda: starts() == 2, "each pod has said that it runs", 60)
        old = self.vms()
        self.cluster.reboot()
        begun = time.monotonic()
        for name in pods:  # the same pods, with one more start each
            self.wait(f"pod/{name}", "jsonpath={.status.containerStatuses[0].restartCount}=1", 300)
        self.rolled_out("deployment/web")
        print(f"[back in {time.monotonic() - begun:.0f} s]", end=" ")
        self.assertEqual(self.names("web"), pods)
        until(lambda: starts() >= 4, "each pod has said that it runs again", 60)
        self.assertEqual(starts(), 4)
        self.assertEqual(len(list(runs.glob("once.*"))), 1)
        for name in pods:
            self.assertEqual(self.run_in(name, "echo alive"), "alive\n")
        until(lambda: self.only_new(old, len(pods)), "nothing is left of the old ones", 180)

    def only_new(self, old: set[str], count: int) -> bool:
        """Whether the VMs are those of the pods that run, and none of before."""
        now = self.vms()
        return len(now) == count and not now & old and self.machines() == now
