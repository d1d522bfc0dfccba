# SPDX-License-Identifier: Apache-2.0
"""What the child can't do while it reads a layer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.harness.needs import needs_programs, needs_root

PROGRAM = """
import os, select, signal, socket, subprocess, sys, threading, time
from infranetes.images.erofs import limits, sandbox

def attempt(name, work):
    try:
        work()
    except (OSError, RuntimeError) as e:
        print(name, "refused", flush=True)
    else:
        print(name, "done", flush=True)

sandbox.enter(limits.Limits())
attempt("thread", threading.Thread(target=lambda: None).start)
attempt("open", lambda: os.open("/etc/passwd", os.O_RDONLY))
attempt("make", lambda: os.mkdir("/tmp/made-by-the-child"))
attempt("socket", lambda: (os.close(0), socket.socket()))
attempt("fork", os.fork)
attempt("exec", lambda: os.execv("/bin/true", ["true"]))
attempt("kill", lambda: os.kill(os.getppid(), 0))
attempt("root", lambda: os.setuid(0))
sys.stderr.read()
"""


class SandboxTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.read, self.hold = os.pipe()  # the child waits for the end of this
        self.addCleanup(os.close, self.read)
        self.child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.read,
        )
        self.addCleanup(self.end)
        assert self.child.stdout is not None
        self.said = dict(self.child.stdout.readline().decode().split() for _ in range(8))

    def end(self) -> None:
        os.close(self.hold)
        self.child.kill()
        self.child.communicate()

    def test_it_can_only_compute_and_use_what_is_open(self) -> None:
        refused = dict.fromkeys(("open", "make", "socket", "fork", "exec", "kill", "root"), "refused")
        self.assertEqual(self.said, {"thread": "done", **refused})

    @needs_root
    @needs_programs("mkfs.erofs")
    def test_it_is_a_user_that_nothing_else_is_and_has_no_capability(self) -> None:
        lines = Path(f"/proc/{self.child.pid}/status").read_text().splitlines()
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        user = str(1_900_010_000 + self.child.pid)
        self.assertEqual((status["Uid"].split(), status["Gid"].split()), ([user] * 4, [user] * 4))
        self.assertEqual(status["Groups"].split(), [])
        self.assertEqual(
            [int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")], [0] * 4
        )
        self.assertEqual((status["NoNewPrivs"], status["Seccomp"]), ("1", "2"))

    def test_what_it_may_use_is_bounded(self) -> None:
        limits = Path(f"/proc/{self.child.pid}/limits").read_text()
        for name in ("cpu time", "file size", "address space", "open files", "processes", "core file size"):
            line = next(line for line in limits.splitlines() if line.startswith(f"Max {name}"))
            self.assertNotIn("unlimited", line)


class ImportTests(SynchronousTestCase):
    def test_the_child_starts_without_twisted(self) -> None:
        program = "import infranetes.images.erofs.__main__, sys; print(*sys.modules)"
        done = subprocess.run(
            [sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True
        )
        packages = {name.partition(".")[0] for name in done.stdout.split()}
        self.assertIn("infranetes", packages)
        self.assertEqual(packages & {"twisted", "txgrpc", "infranetes_common", "asyncio", "ssl"}, set())
