# SPDX-License-Identifier: Apache-2.0
"""Commands in running containers, with `crun exec`."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.internet.utils import getProcessOutputAndValue
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes_common import spawning
from infranetes_common.concurrency import sleep, start, within
from infranetes_common.errors import DeadlineExceeded, FailedPrecondition, Unavailable
from tests.contract.container_sessions import living, resident
from tests.harness.durations import slow
from tests.harness.needs import needs_mounts
from tests.support.crun import process
from tests.vmserver.containers.oci.case import CrunCase, Made, reactor
from vmserver.containers.interface import ExecResult, ISession, Streams
from vmserver.containers.oci.cgroup import ROOT, is_v2
from vmserver.containers.oci.exec_launch import CommandGroups
from vmserver.containers.oci.execs import Execs
from vmserver.containers.oci.runtime import Crun

MIB = 1024 * 1024
ALL = Streams(stdin=True, stdout=True, stderr=True)
TERMINAL = Streams(tty=True, stdin=True, stdout=True)


class ExecTests(CrunCase):
    drain = 0.3

    def setUp(self) -> None:
        super().setUp()
        (self.directory / "x").mkdir(mode=0o700)
        self.execs = Execs(reactor, self.crun, self.directory / "x", self.drain)

    async def sync(
        self, made: Made, *args: str, timeout: float = 60, limit: int = MIB, **env: str
    ) -> ExecResult:
        """Execute a command to its end."""
        document = process(args, env=env)
        return await self.execs.exec_sync(made.container.id, document, 333, timeout, limit)

    async def opened(self, made: Made, streams: Streams, *args: str) -> Any:
        """Return a session of a command with these streams."""
        session = await self.execs.exec_session(made.container.id, process(args), 333, streams)
        self.addCleanup(lambda: self.closed(session))
        return session

    def closed(self, session: ISession) -> Deferred[int]:
        session.close()
        return session.ended().addTimeout(self.seconds, reactor)

    async def heard(self, session: Any) -> tuple[bytes, bytes, int]:
        """Return everything that the command writes, and its exit code."""

        async def read() -> tuple[bytes, bytes, int]:
            said = {"stdout": b"", "stderr": b""}
            async for stream, data in session.output:
                said[stream] += data
            return said["stdout"], said["stderr"], int(await session.ended())

        return await within(reactor, self.seconds, read(), "the command")

    async def test_both_streams_the_exit_code_and_a_bound(self) -> None:
        made = await self.started("sleep", "600")
        script = "echo out; echo err >&2; exit 3"
        self.assertEqual(await self.sync(made, "sh", "-c", script), ExecResult(b"out\n", b"err\n", 3))
        self.assertEqual((await self.sync(made, "echo", "0123456789", limit=4)).stdout, b"0123")
        for code in (1, 255, 137):
            self.assertEqual((await self.sync(made, "sh", "-c", f"exit {code}")).exit_code, code)
        self.assertEqual((await self.sync(made, "sh", "-c", "kill -9 $$")).exit_code, 137)
        self.assertEqual((await self.sync(made, "cat")).stdout, b"")

    async def test_a_crun_that_hangs_is_given_up(self) -> None:
        made = await self.started("sleep", "600")
        hanging = self.directory / "hanging"
        hanging.write_text("#!/bin/sh\nexec sleep 600\n")
        hanging.chmod(0o755)
        self.execs = Execs(reactor, Crun(reactor, self.crun.root, str(hanging), 0.3), self.directory / "x")
        with self.assertRaises(Unavailable) as caught:
            await self.sync(made, "true", timeout=0)
        self.assertIn("crun did not begin the command", str(caught.exception))
        for streams in (ALL, TERMINAL):
            session = await self.opened(made, streams, "true")
            with self.assertRaises(Unavailable):
                await self.heard(session)
            self.assertEqual(await session.ended(), 137)
        await self.until(lambda: not os.listdir(self.directory / "x"), "nothing is left")

    async def test_a_command_that_takes_long_is_not_given_up(self) -> None:
        made = await self.started("sleep", "600")
        clock: Any = Clock()  # Any: methods of the reactor are added
        for name in ("addReader", "removeReader", "addWriter", "removeWriter"):
            setattr(clock, name, getattr(reactor, name))
        self.execs = Execs(clock, self.crun, self.directory / "x")
        session = await self.opened(made, ALL, "cat")
        await session.write(b"1")
        self.assertEqual(await anext(session.output), ("stdout", b"1"))
        clock.advance(self.crun.seconds)
        await session.write(b"2")
        session.close_stdin()
        self.assertEqual(await self.heard(session), (b"2", b"", 0))

    async def test_what_can_not_be_executed(self) -> None:
        made = await self.started("sleep", "600")
        for name, mode, text in (("plain", 0o644, "text"), ("garbage", 0o755, "\x7fnothing")):
            (self.rootfs / "bin" / name).write_text(text)
            (self.rootfs / "bin" / name).chmod(mode)
        # Some releases of crun refuse such a file at once, others look for one of that name elsewhere first.
        directly = [self.program, f"--root={self.crun.root}", "exec", made.container.id, "plain"]
        told = subprocess.run(directly, check=False, capture_output=True, text=True).stderr
        self.assertRegex(told, "not found|Permission denied|not executable")
        plain = 127 if "not found" in told else 126
        for command, code in (
            ("/no/such", 127),
            ("nosuch", 127),
            ("plain", plain),
            ("/bin/plain", 126),
            ("/bin/garbage", 126),
        ):
            result = await self.sync(made, command)
            self.assertEqual((command, result.exit_code), (command, code))
            self.assertTrue(result.stderr)
            for streams in (ALL, TERMINAL, Streams(stdout=True)):
                out, err, ended = await self.heard(await self.opened(made, streams, command))
                self.assertEqual((command, ended, out, err), (command, code, out, err), streams)
                self.assertEqual(bool(out + err), streams != Streams(stdout=True))

    async def test_only_in_a_container_that_runs(self) -> None:
        waiting = await self.created("true")
        ended = await self.started("true")
        await self.end(ended)
        for id in (waiting.container.id, ended.container.id, "0" * 32):
            with self.assertRaises(FailedPrecondition):
                await self.execs.exec_sync(id, process(["true"]), 0, 0, 0)
            with self.assertRaises(FailedPrecondition):
                await self.execs.exec_session(id, process(["true"]), 0, TERMINAL)

    async def test_the_kernel_takes_the_command_before_the_agent(self) -> None:
        made = await self.started("sleep", "600")
        for _ in range(10):
            self.assertEqual((await self.sync(made, "cat", "/proc/self/oom_score_adj")).stdout, b"333\n")

    async def test_what_is_executed_is_in_no_file_and_no_list_of_processes(self) -> None:
        made = await self.started("sleep", "600")
        secret = "hunter2" * 15000  # more than a pipe's buffer
        running = start(self.sync(made, "sh", "-c", "echo ${#SECRET}; sleep 1", SECRET=secret))
        seen = []
        while not running.called:
            for pid in os.listdir("/proc"):
                if pid.isdecimal():
                    with contextlib.suppress(OSError):
                        seen.append(b"hunter2" in Path("/proc", pid, "cmdline").read_bytes())
            await sleep(reactor, 0.02)
        self.assertEqual((await running).stdout, b"%d\n" % len(secret))
        self.assertGreater(len(seen), 100)
        self.assertFalse(any(seen))
        self.assertEqual(os.listdir(self.directory / "x"), [])

    async def test_out_of_time_it_is_killed_with_what_it_has_started(self) -> None:
        made = await self.started("sleep", "600")
        marker = str(610000 + os.getpid() % 10000)
        script = f"(sleep {marker} & sleep {marker}) & sleep {marker}"
        with self.assertRaises(DeadlineExceeded):
            await self.sync(made, "sh", "-c", script, timeout=1.0)
        await self.until(lambda: not living("sleep", marker), "they have ended")

    if is_v2():

        async def test_a_process_that_has_left_its_family_is_killed_too(self) -> None:
            made = await self.started("sleep", "600")
            marker = str(640000 + os.getpid() % 10000)
            script = f"setsid sh -c 'sleep {marker} & :'; sleep {marker}"
            with self.assertRaises(DeadlineExceeded):
                await self.sync(made, "sh", "-c", script, timeout=1.0)
            session = await self.opened(made, TERMINAL, "sh", "-c", script)
            await self.until(lambda: len(living("sleep", marker)) == 2, "they run")
            session.close()
            await self.until(lambda: not living("sleep", marker), "they have ended")
            status = self.crun.status(made.container.id)
            assert status is not None and status.cgroup is not None and status.cgroup.unified is not None
            groups = status.cgroup.unified

            async def next_command() -> None:
                # The kernel may keep a killed command's cgroup for a moment; the next command removes it.
                while list(groups.glob("exec-*")):
                    await self.sync(made, "true")

            await within(reactor, self.seconds, start(next_command()), "removing the commands' cgroups")

    async def test_a_caller_who_leaves_ends_it(self) -> None:
        made = await self.started("sleep", "600")
        marker = str(620000 + os.getpid() % 10000)
        running = start(self.sync(made, "sleep", marker))
        await self.until(lambda: living("sleep", marker), "it runs")
        running.cancel()
        with self.assertRaises(CancelledError):
            await running
        await self.until(lambda: not living("sleep", marker), "it has ended")

    async def test_a_process_left_behind_does_not_hold_the_command(self) -> None:
        made = await self.started("sleep", "600")
        script = "sleep 600 & echo left"
        self.assertEqual((await self.sync(made, "sh", "-c", script)).stdout, b"left\n")
        for streams in (ALL, TERMINAL):
            out, _, code = await self.heard(await self.opened(made, streams, "sh", "-c", script))
            self.assertEqual((out.strip(), code), (b"left", 0))
        self.assertGreaterEqual(len((await self.sync(made, "pidof", "sleep")).stdout.split()), 3)

    async def test_one_left_behind_among_the_vms_own_processes_does_not_hold_it_either(self) -> None:
        container = self.monitored("sleep", "600")
        file = container.bundle / "config.json"
        document = json.loads(file.read_text())
        document["linux"]["namespaces"] = [{"type": "mount"}]
        file.write_text(json.dumps(document))
        made = Made(container, await self.conmon.create(container))
        await self.crun.start(container.id)
        script = "sleep 600 & echo left; exit 3"
        self.assertEqual(await self.sync(made, "sh", "-c", script), ExecResult(b"left\n", b"", 3))
        self.assertEqual((await self.sync(made, "sh", "-c", "sleep 1; exit 4")).exit_code, 4)
        for streams in (ALL, TERMINAL):
            out, _, code = await self.heard(await self.opened(made, streams, "sh", "-c", script))
            self.assertEqual((out.strip(), code), (b"left", 3))
        self.assertEqual(os.listdir(self.directory / "x"), [])

    async def test_a_session_with_pipes(self) -> None:
        made = await self.started("sleep", "600")
        session = await self.opened(made, ALL, "sh", "-c", "cat; echo end >&2; exit 4")
        await session.write(b"one\x00\xff")
        session.close_stdin()
        self.assertEqual(await self.heard(session), (b"one\x00\xff", b"end\n", 4))

    async def test_a_session_with_a_terminal(self) -> None:
        made = await self.started("sleep", "600")
        script = "stty -echo; echo ready; read x; stty size; tty; read x; echo $x; cat; exit 5"
        session = await self.opened(made, TERMINAL, "sh", "-c", script)
        await session.resize(132, 43)
        await session.write(b"go\n\xc5\xbc\n")
        session.close_stdin()
        out, err, code = await self.heard(session)
        self.assertEqual((err, code), (b"", 5))
        self.assertIn("ready\r\n43 132\r\n/dev/pts/0\r\nż\r\n".encode(), out)
        await session.resize(10, 10)
        await session.write(b"too late")

    async def test_a_terminal_whose_command_can_not_be_run_leaves_no_socket(self) -> None:
        def full(*_: object) -> int:
            raise BlockingIOError(errno.EAGAIN, "no more processes")

        made = await self.started("sleep", "600")
        self.execs = Execs(reactor, self.crun, self.directory / "x")
        self.patch(spawning, "_posix_spawn", full)
        for streams in (ALL, TERMINAL):
            with self.assertRaisesRegex(Unavailable, "no more processes"):
                await self.opened(made, streams, "true")
        await self.until(lambda: os.listdir(self.directory / "x") == [], "no socket is left")

    async def test_the_end_of_a_command_with_a_terminal_is_told_at_once(self) -> None:
        """Only what it leaves behind is waited for."""
        made = await self.started("sleep", "600")
        self.execs = Execs(reactor, self.crun, self.directory / "x", drain=600.0)
        session = await self.opened(made, TERMINAL, "sh", "-c", "echo bye; exit 3")
        self.assertEqual(await self.heard(session), (b"bye\r\n", b"", 3))

    async def test_a_writer_waits_no_longer_once_the_command_has_ended(self) -> None:
        made = await self.started("sleep", "600")
        self.execs = Execs(reactor, self.crun, self.directory / "x", drain=600.0)
        session = await self.opened(made, TERMINAL, "sh", "-c", "stty raw; echo ready; sleep 0.2")
        await anext(session.output)
        writing = session.write(b"x" * 200_000)
        self.assertFalse(writing.called)
        await within(reactor, self.seconds, writing, "the writer")

    async def test_a_terminal_that_is_closed_ends_its_command(self) -> None:
        made = await self.started("sleep", "600")
        marker = str(630000 + os.getpid() % 10000)
        session = await self.opened(made, TERMINAL, "sh", "-c", f"sleep {marker} & sleep {marker}")
        await self.until(lambda: len(living("sleep", marker)) == 2, "they run")
        for _ in range(2):
            session.close()

        async def rest() -> list[tuple[str, bytes]]:
            return [each async for each in session.output]

        self.assertTrue(start(rest()).called, "who leaves waits for no output")
        await self.until(lambda: not living("sleep", marker), "they have ended")
        self.assertEqual(await session.ended(), 137)

    async def test_much_through_a_terminal_whose_reader_is_slow(self) -> None:
        made = await self.started("sleep", "600")
        script = f"stty raw; head -c {16 * MIB} /dev/zero"
        session = await self.opened(made, TERMINAL, "sh", "-c", script)
        await self.until(lambda: session.output.paused, "the writer waits")
        before = resident()
        await sleep(reactor, 0.5)
        self.assertTrue(living(script), "it goes on writing only once that is read")
        size = 0
        async for _, data in session.output:
            size += len(data)
        self.assertEqual((size, await session.ended()), (16 * MIB, 0))
        self.assertLess(resident() - before, 8 * MIB)

    async def test_a_session_that_is_not_wanted_any_more(self) -> None:
        made = await self.started("sleep", "600")
        for streams in (ALL, TERMINAL):
            opening = start(self.execs.exec_session(made.container.id, process(["sleep", "600"]), 0, streams))
            if streams.tty:
                opening.cancel()
                with self.assertRaises(CancelledError):
                    await opening
            else:
                session = await opening
                session.close()
                await session.ended()
        await self.until(lambda: os.listdir(self.directory / "x") == [], "no socket is left")
        await self.until(lambda: not living("exec", made.container.id), "no crun is left")


class CommandGroupsTests(SynchronousTestCase):
    """Plain directories stand in for cgroups: a non-empty one can't be removed either."""

    def test_one_that_could_not_be_removed_goes_with_the_next(self) -> None:
        top = Path(self.mktemp())
        busy, other = top / "exec-1", top / "exec-2"
        (busy / "process").mkdir(parents=True)
        groups = CommandGroups()
        groups.remove(busy)
        self.assertTrue(busy.exists())
        (busy / "process").rmdir()
        other.mkdir()
        groups.remove(other)
        self.assertEqual(list(top.iterdir()), [])
        self.assertEqual(list(groups._left), [])

    def test_one_that_went_with_its_container_is_forgotten(self) -> None:
        top = Path(self.mktemp())
        groups = CommandGroups()
        groups.remove(top / "exec-1")
        self.assertEqual(list(groups._left), [])

    def test_many_that_stay_are_tried_some_at_a_time_in_turn(self) -> None:
        top = Path(self.mktemp())
        busy = [top / f"exec-{number:03}" for number in range(3 * CommandGroups.AT_ONCE)]
        groups = CommandGroups()
        for each in busy:
            (each / "process").mkdir(parents=True)
            groups.remove(each)
        for each in busy:
            (each / "process").rmdir()
        groups.remove(top / "exec-last")
        self.assertEqual(len(list(top.iterdir())), 2 * CommandGroups.AT_ONCE)
        for _ in range(2):
            groups.remove(top / "exec-last")
        self.assertEqual(list(top.iterdir()), [])


if not is_v2() and (ROOT / "unified").is_dir():

    @needs_mounts
    class UnifiedTests(TestCase):
        """The same with cgroup v2, which this machine has beside v1 and the guest has by itself."""

        timeout = 300

        @slow(20, "it runs all tests of commands a second time")
        async def test_commands_with_cgroup_v2(self) -> None:
            trial = f"{sys.executable} -m twisted.trial --temp-directory={self.mktemp()}"
            script = f"mount --bind {ROOT / 'unified'} {ROOT} && exec {trial} {__name__}.ExecTests"
            arguments = ["--mount", "sh", "-c", script]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            out, err, code = await getProcessOutputAndValue(
                "unshare", arguments, environment, reactor=reactor
            )
            self.assertEqual(code, 0, (out + err).decode(errors="replace"))
