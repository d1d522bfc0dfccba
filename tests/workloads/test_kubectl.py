# SPDX-License-Identifier: Apache-2.0
"""kubectl's commands for pods, as used by hand."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.cluster.case import BUSYBOX, Cluster, container, pod, states, until
from tests.workloads.case import IDLE, PORT, SERVE, WorkloadCase

MEGABYTE = 1 << 20
REQUESTS = 200
AT_ONCE = 8
LARGE_SECONDS = 900


@contextlib.contextmanager
def going_on(cluster: Cluster, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a kubectl until the end of the block."""
    process = subprocess.Popen(
        [str(cluster.paths.kubectl), *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    """Print how long the block takes."""
    begun = time.monotonic()
    yield
    print(f"[{what} {time.monotonic() - begun:.0f} s]", end=" ")


@contextlib.contextmanager
def forwarded(cluster: Cluster, namespace: str, name: str) -> Iterator[str]:
    """Forward a pod's PORT, and yield its URL in the network of the node, where kubectl runs."""
    words = ("--namespace", namespace, "port-forward", f"pod/{name}", f":{PORT}")
    with going_on(cluster, *words) as forward:
        assert forward.stdout
        line = forward.stdout.readline().decode()
        matched = re.match(r"Forwarding from 127\.0\.0\.1:(\d+)", line)
        assert matched, line
        yield f"http://127.0.0.1:{matched[1]}"


class DebugTests(WorkloadCase):
    def test_an_ephemeral_container_sees_the_pods_processes(self) -> None:
        self.apply(pod("victim", container("main", IDLE)))
        before = self.wait_until_ready("victim")
        words = ("debug", "victim", f"--image={BUSYBOX}", "--container=looker", "--target=main")
        self.here(*words, "--", "sh", "-c", "ps; echo looked; sleep 1")
        ended = "jsonpath={.status.ephemeralContainerStatuses[0].state.terminated.reason}=Completed"
        self.wait("pod/victim", ended, 120)
        said = self.logs("victim", "--container=looker")
        self.assertIn("while true; do sleep 0.5", said)  # a process of the other container
        self.assertIn("looked", said)
        self.assertEqual(states(self.get("pod", "victim")), states(before))

    def test_a_copy_of_a_pod_has_another_command(self) -> None:
        self.apply(pod("broken", container("main", "exit 3")))
        self.wait_for_phase("broken", "Failed")
        words = ("debug", "broken", "--copy-to=copy", "--container=main")
        self.here(*words, "--", "sh", "-c", "echo copied")
        self.wait_for_phase("copy", "Succeeded")
        self.assertEqual(self.logs("copy"), "copied\n")


class CopyTests(WorkloadCase):
    def test_files_are_copied_both_ways(self) -> None:
        self.apply(pod("box", container("main", IDLE)))
        self.wait_until_ready("box")
        here, back = Path(self.mktemp()).absolute(), Path(self.mktemp()).absolute()
        here.mkdir()
        data = {"small": b"hello\n", "empty": b"", "large": os.urandom(8 * MEGABYTE)}
        for name, content in data.items():
            (here / name).write_bytes(content)
        there = f"{self.namespace}/box:/tmp/there"
        self.kubectl("cp", str(here), there, timeout=300)
        found = self.run_in("box", "cd /tmp/there && sha256sum *")
        sums = {name: hashlib.sha256(content).hexdigest() for name, content in data.items()}
        self.assertEqual({line.split()[1]: line.split()[0] for line in found.splitlines()}, sums)
        self.kubectl("cp", there, str(back), timeout=300)
        self.assertEqual({path.name: path.read_bytes() for path in back.iterdir()}, data)


class AttachTests(WorkloadCase):
    def test_attached_input_and_output_are_the_containers(self) -> None:
        main = container(
            "main", 'echo ready; while read line; do echo "had $line"; done; echo end', stdin=True
        )
        self.apply(pod("talker", {**main, "stdinOnce": True}))
        self.wait_until_ready("talker")
        until(lambda: self.logs("talker") == "ready\n", "it has begun", 60)
        words = ("--namespace", self.namespace, "attach", "--stdin", "talker")
        done = self.cluster.kubectl(*words, given=b"one\ntwo\n")
        self.assertEqual((done.returncode, done.stdout[-21:]), (0, b"had one\nhad two\nend\n"[-21:]))
        self.wait_for_phase("talker", "Succeeded", 60)
        self.assertEqual(self.logs("talker"), "ready\nhad one\nhad two\nend\n")


class PortForwardTests(WorkloadCase):
    def test_many_connections_are_forwarded_at_once(self) -> None:
        """An exec in the pod goes on meanwhile."""
        fill = f"mkdir -p /www && dd if=/dev/urandom of=/www/blob bs=1M count=1 2>/dev/null && {SERVE}"
        self.apply(pod("web", container("web", fill.format(page="hello"))))
        self.wait_until_ready("web")
        self.until_said("web", f"wget -q -O - http://127.0.0.1:{PORT}/", "hello")
        wanted = self.run_in("web", "sha256sum /www/blob").split()[0]
        with forwarded(self.cluster, self.namespace, "web") as url:
            script = (
                f"for i in $(seq {REQUESTS // AT_ONCE}); do"
                f" busybox wget -q -O - {url}/ || echo failed; done;"
                f" busybox wget -q -O - {url}/blob | sha256sum"
            )
            with concurrent.futures.ThreadPoolExecutor(AT_ONCE + 1) as pool:
                said = pool.map(lambda _: self.cluster.inside("sh", "-c", script), range(AT_ONCE))
                answers = list(said)
        for each in answers:
            self.assertEqual(each.split("\n")[:-2], ["hello"] * (REQUESTS // AT_ONCE))
            self.assertIn(wanted, each)


class LargeTests(WorkloadCase):
    """Much data on one connection. The tests print how long it takes."""

    def test_80_mib_are_copied_both_ways_and_forwarded(self) -> None:
        self.apply(pod("box", container("main", SERVE.format(page="hello"))))
        self.wait_until_ready("box")
        self.until_said("box", f"wget -q -O - http://127.0.0.1:{PORT}/", "hello")
        here, back = Path(self.mktemp()).absolute(), Path(self.mktemp()).absolute()
        data = os.urandom(80 * MEGABYTE)
        here.write_bytes(data)
        wanted = hashlib.sha256(data).hexdigest()
        there = f"{self.namespace}/box:/www/large"
        with timed("there"):
            self.kubectl("cp", str(here), there, timeout=LARGE_SECONDS)
        self.assertEqual(self.run_in("box", "sha256sum /www/large").split()[0], wanted)
        with timed("back"):
            self.kubectl("cp", there, str(back), timeout=LARGE_SECONDS)
        self.assertEqual(hashlib.sha256(back.read_bytes()).hexdigest(), wanted)
        with forwarded(self.cluster, self.namespace, "box") as url, timed("forwarded"):
            script = f"busybox wget -q -O - {url}/large | sha256sum"
            command = [str(self.cluster.paths.inside), "sh", "-c", script]
            done = subprocess.run(command, capture_output=True, text=True, timeout=LARGE_SECONDS)
        self.assertEqual(done.stdout.split()[:1], [wanted], done.stderr)
