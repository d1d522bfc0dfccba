# SPDX-License-Identifier: Apache-2.0
"""Pods outlive the daemon; what they wrote is complete; and a VM that dies is replaced."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from pathlib import Path

from tests.cluster.case import ClusterCase, container, pod, states, until

# 100 bytes a line, several hundred lines a second.
NUMBERED = (
    'i=0; while [ $i -lt {lines} ]; do echo "$i {pad}"; i=$((i+1)); [ $((i % 50)) = 0 ] && sleep 0.2; done'
)


class FaultTests(ClusterCase):
    def killed_daemon(self) -> None:
        """Kill the daemon, which is started again as by its systemd unit."""
        before = self.cluster.inside("cat", str(self.cluster.paths.place / "infranetes.pid"))
        self.cluster.kill("infranetes")

        def back() -> bool:
            pid = self.cluster.inside("cat", str(self.cluster.paths.place / "infranetes.pid"))
            return pid != before and self.cluster.cri_answers()

        until(back, "the daemon is back", 60)

    def test_a_killed_daemon_costs_pods_nothing(self) -> None:
        self.apply(
            pod("steady", container("main", "i=0; while true; do echo $i; i=$((i+1)); sleep 0.2; done")),
            pod("other", container("main", "exec sleep 1000")),
        )
        before = {name: self.wait_until_ready(name) for name in ("steady", "other")}
        for _ in range(2):
            self.killed_daemon()
            self.more_lines("steady", 15)
        self.assertEqual(self.execute("other", "echo", "alive").stdout, b"alive\n")
        for found in before.values():
            self.assert_same_run(found)
        lines = self.logs("steady").split()
        self.assertEqual(lines, [str(number) for number in range(len(lines))])

    def more_lines(self, name: str, count: int) -> None:
        """Wait until the pod's log has `count` more lines."""
        seen = len(self.logs(name).split())
        until(lambda: len(self.logs(name).split()) >= seen + count, "the log goes on", 60)

    def test_a_pod_made_while_the_daemon_dies_runs_once(self) -> None:
        self.apply(pod("new", container("main", "echo once")))
        self.killed_daemon()
        done = self.wait_for_phase("new", "Succeeded", 180)
        self.assertEqual(states(done)["main"]["restartCount"], 0)
        self.assertEqual(self.logs("new"), "once\n")

    def test_a_pod_whose_vm_dies_gets_another(self) -> None:
        script = "trap 'exit 0' TERM; while true; do sleep 0.2; done"
        self.apply(
            pod("victim", container("main", script), restartPolicy="Always"),
            pod("bystander", container("main", script), restartPolicy="Always"),
        )
        self.wait_until_ready("victim")
        bystander = self.wait_until_ready("bystander")
        self.cluster.kill_vm(self.namespace, "victim")
        self.wait("pod/victim", "jsonpath={.status.containerStatuses[0].restartCount}=1", 120)
        self.wait_until_ready("victim", 120)
        self.assertEqual(self.execute("victim", "echo", "alive").stdout, b"alive\n")
        self.assertEqual(states(self.get("pod", "bystander")), states(bystander))

    def test_no_line_is_lost_or_doubled_by_rotation_and_a_killed_daemon(self) -> None:
        count = 4000
        script = NUMBERED.format(lines=count, pad="x" * 95) + "; exec sleep 1000"
        self.apply(pod("talkative", container("main", script)))
        self.wait_until_ready("talkative")
        until(lambda: len(self.files()) > 1, "the log is rotated", 90)
        self.killed_daemon()
        until(lambda: self.numbers()[-1:] == [count - 1], "the last line is on the node", 180)
        self.assertGreater(len(self.files()), 2)
        self.assertEqual(self.numbers(), list(range(count)))

    def files(self) -> list[Path]:
        """The pod's log files, the oldest first."""
        pods = self.cluster.paths.place / "var-log" / "pods"
        found = [
            path for path in pods.glob(f"{self.namespace}_talkative_*/main/0.log*") if path.suffix != ".tmp"
        ]
        # 0.log is the newest; rotated files have the time in their names.
        return sorted(found, key=lambda path: (path.name == "0.log", path.name))

    def numbers(self) -> list[int]:
        """The numbers of the lines in these files."""
        openers: dict[bool, Callable[[Path], bytes]] = {
            True: lambda path: gzip.decompress(path.read_bytes()),
            False: Path.read_bytes,
        }
        try:
            text = b"".join(openers[path.suffix == ".gz"](path) for path in self.files()).decode()
        except (FileNotFoundError, EOFError):  # kubelet is just compressing a file
            return []
        return [int(number) for number in re.findall(r"^\S+ stdout F (\d+) x", text, flags=re.M)]
