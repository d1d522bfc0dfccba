# SPDX-License-Identifier: Apache-2.0
"""Children that are started without a fork, and that have what they are given and nothing else."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
from collections.abc import Mapping

from twisted.internet.defer import Deferred
from twisted.internet.process import Process
from twisted.internet.protocol import ProcessProtocol
from twisted.python.failure import Failure
from twisted.trial.unittest import TestCase

from infranetes_common import spawning
from infranetes_common.commands import exit_code
from infranetes_common.concurrency import within
from infranetes_common.errors import Unavailable
from infranetes_common.processes import process_state
from infranetes_common.reactors import installed
from infranetes_common.spawning import spawn

reactor = installed()

OUTPUT = {0: "w", 1: "r", 2: "r"}


class Child(ProcessProtocol):
    transport: Process

    def __init__(self) -> None:
        self.said: dict[int, bytes] = {}
        self.ended: Deferred[int] = Deferred()

    def childDataReceived(self, childFD: int, data: bytes) -> None:
        self.said[childFD] = self.said.get(childFD, b"") + data

    def processEnded(self, reason: Failure) -> None:
        self.ended.callback(exit_code(reason))


class SpawnTests(TestCase):
    def setUp(self) -> None:
        def fork() -> int:
            raise AssertionError("fork takes longer the more memory this process has")

        self.patch(os, "fork", fork)

    def start(self, script: str, descriptors: Mapping[int, int | str] = OUTPUT) -> Child:
        made = Child()
        environment = {"PATH": os.environ["PATH"], "SAID": "ż = 1"}
        spawn(reactor, made, ["/bin/sh", "-c", script, "sh", "ż"], environment, "/usr", descriptors)
        return made

    async def end(self, child: Child) -> int:
        return await within(reactor, 20.0, child.ended, "the child")

    async def told(self, script: str, descriptors: Mapping[int, int | str] = OUTPUT) -> str:
        child = self.start(script, descriptors)
        self.assertEqual((await self.end(child), child.said.get(2)), (0, None))
        return child.said.get(1, b"").decode()

    def open(self, path: str) -> int:
        made = os.open(path, os.O_RDWR | os.O_CREAT)
        self.addCleanup(os.close, made)
        return made

    async def test_it_has_its_words_environment_and_directory(self) -> None:
        told = await self.told('pwd; echo "$1"; tr "\\0" "\\n" </proc/$$/environ')
        self.assertEqual(told.splitlines(), ["/usr", "ż", f"PATH={os.environ['PATH']}", "SAID=ż = 1"])
        self.assertNotEqual(os.getcwd(), "/usr")

    async def test_its_streams_are_pipes_and_its_end_is_told(self) -> None:
        child = self.start("cat; echo bad >&2; echo more >&3; exit 7", {**OUTPUT, 3: "r"})
        child.transport.write(b"x" * 300_000)
        child.transport.closeStdin()
        self.assertEqual(await self.end(child), 7)
        self.assertEqual(child.said, {1: b"x" * 300_000, 2: b"bad\n", 3: b"more\n"})

    async def test_it_has_no_other_descriptors(self) -> None:
        null = self.open(os.devnull)
        os.set_inheritable(null, True)
        far = fcntl.fcntl(null, fcntl.F_DUPFD, 200)
        self.addCleanup(os.close, far)
        told = await self.told("ls /proc/$$/fd", {**OUTPUT, null + 1: null})
        self.assertEqual(sorted(map(int, told.split())), [0, 1, 2, null + 1])

    async def test_descriptors_that_change_places(self) -> None:
        """Each is what this process has by that number at the start, whatever the child's numbers are."""
        first, second = self.open(self.mktemp()), self.open(self.mktemp())
        numbers = range(first + 20, first + 80)  # some are those that this process takes next
        files = {number: first if number > first + 50 else second for number in numbers}
        script = "".join(f"echo {number} >>/dev/fd/{number}\n" for number in numbers)
        self.assertEqual(await self.end(self.start(script, {**OUTPUT, **files})), 0)
        for file in (first, second):
            said = os.pread(file, 1000, 0).decode().split()
            self.assertEqual(said, [str(number) for number in numbers if files[number] == file])

    async def test_it_ignores_no_signal_and_blocks_none(self) -> None:
        """Python ignores SIGPIPE, and what is ignored or blocked stays so when a program is executed."""
        self.assertEqual(signal.getsignal(signal.SIGPIPE), signal.SIG_IGN)
        told = await self.told("grep ^Sig /proc/self/status")
        sets = {line.split(":")[0]: int(line.split()[1], 16) for line in told.splitlines()[2:]}
        of_the_library = 1 << 31 | 1 << 32  # 32 and 33, which no program can send or receive
        self.assertEqual((sets["SigBlk"], sets["SigIgn"] & ~of_the_library), (0, 0))

    async def test_what_can_not_be_started_is_told_and_leaves_nothing(self) -> None:
        gc.collect()  # what other tests have left closes its own
        before = set(os.listdir("/proc/self/fd"))
        for path, directory in (("/no such program", "/usr"), ("/bin/sh", "/no such directory")):
            made = Child()
            with self.assertRaisesRegex(Unavailable, f"{path} can't be started: No such file"):
                spawn(reactor, made, [path], {}, directory, OUTPUT)
        gc.collect()
        self.assertEqual(set(os.listdir("/proc/self/fd")) - before, set())

    async def test_a_started_child_leaves_nothing(self) -> None:
        await self.end(self.start("exit 0"))  # the reactor keeps what it needs for the first one
        before = set(os.listdir("/proc/self/fd"))
        child = self.start("exit 0")
        pid = child.transport.pid
        await self.end(child)
        self.assertEqual((set(os.listdir("/proc/self/fd")), process_state(pid or 0)), (before, ("", 0)))


class OldLibraryTests(SpawnTests):
    """Where the C library can't close all other descriptors (before glibc 2.34), the process is forked."""

    def setUp(self) -> None:
        self.patch(spawning, "_CLOSE_FROM", None)

    async def test_what_can_not_be_started_is_told_and_leaves_nothing(self) -> None:
        child = Child()
        spawn(reactor, child, ["/no such program"], {}, "/usr", OUTPUT)
        self.assertEqual(await self.end(child), 1)
