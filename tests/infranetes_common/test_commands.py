# SPDX-License-Identifier: Apache-2.0
"""Programs that are run to their end."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from types import FrameType

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes.providers.qemu.program.process import pids_by_argument
from infranetes_common import commands
from infranetes_common.commands import Command, Output, Running, check, run, thd_check, thd_run
from infranetes_common.concurrency import run_in_thread, start
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InfranetesError,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.reactors import installed
from tests.harness.needs import needs_netns
from tests.support.waiting import until

reactor = installed()
SECONDS = 10.0

# A program that takes no hint, and whose child outlives it unless all of its group is killed.
STUBBORN = (
    "trap '' TERM INT HUP; (trap '' TERM INT HUP; sleep 3661.25) & echo $$ >>pids; echo $! >>pids; wait"
)


def sh(script: str, seconds: float | None = SECONDS, stdin: bytes = b"") -> Command:
    return Command(["sh", "-c", script], seconds, stdin)


async def as_run(command: Command) -> Output:
    return await run(reactor, command)


async def as_thread(command: Command) -> Output:
    return await run_in_thread(reactor, thd_run, command)


class BothWaysTests(TestCase):
    """A program that the reactor waits for, and one that a thread waits for: `run`, `thd_run`."""

    def setUp(self) -> None:
        self.directory = tempfile.mkdtemp(prefix="commands-")
        self.addCleanup(shutil.rmtree, self.directory)

    async def both(self, command: Command) -> Output:
        """Run a command in both ways, which have the same outcome; return it."""
        first, second = await as_run(command), await as_thread(command)
        self.assertEqual(first, second)
        return first

    async def refused(self, command: Command, kind: type[InfranetesError]) -> list[str]:
        """Run a command in both ways, which raise the same error; return its messages."""
        return [str(await self.assertFailure(start(way(command)), kind)) for way in (as_run, as_thread)]

    async def test_code_and_output(self) -> None:
        output = await self.both(sh("cat; echo bad >&2; exit 3", stdin=b"in"))
        self.assertEqual((output.code, output.stdout, output.message()), (3, b"in", "bad"))
        self.assertEqual(output.how, "ended with exit code 3")

    async def test_a_program_killed_by_a_signal_ends_with_minus_its_number(self) -> None:
        output = await self.both(sh("kill -9 $$"))
        self.assertEqual(output.code, -9)
        self.assertIn("was killed by SIGKILL", output.how)
        self.assertEqual((await self.both(sh("kill -15 $$"))).how, "was killed by SIGTERM")

    async def test_input_and_output_that_no_pipe_holds_at_once(self) -> None:
        data = os.urandom(700_000)
        self.assertEqual((await self.both(Command(["cat"], SECONDS, data))).stdout, data)

    async def test_input_that_is_not_read_is_no_failure(self) -> None:
        self.assertEqual((await self.both(sh("exec <&-; exit 4", stdin=bytes(700_000)))).code, 4)

    async def test_output_over_the_bound_is_cut_and_the_program_ends_by_itself(self) -> None:
        command = attrs.evolve(sh("printf 123456789; echo done >&2; exit 5"), most=4)
        output = await self.both(command)
        self.assertEqual((output.code, output.stdout, output.cut), (5, b"1234", True))
        self.assertFalse((await self.both(attrs.evolve(command, most=9))).cut)

    async def test_of_many_messages_the_last_ones_are_kept_in_whole_lines(self) -> None:
        output = await self.both(sh('seq -f "message %g" 1 100000 >&2'))
        lines = output.stderr.decode().splitlines()
        self.assertLess(len(output.stderr), commands.MAX_MESSAGES)
        self.assertEqual(lines[-1], "message 100000")
        self.assertEqual(lines, [f"message {n}" for n in range(100_001 - len(lines), 100_001)])

    async def test_the_first_message_that_is_kept_has_no_half_of_a_secret(self) -> None:
        secret = f"printf 'GET /?token='; yes Planted | head -n {commands.MAX_MESSAGES} | tr -d '\\n'"
        for rest, kept in (("\\nrefused", b"refused"), (" refused", b"refused")):
            output = await self.both(sh(f"{{ {secret}; printf '{rest}'; }} >&2"))
            self.assertEqual(output.stderr, kept)

    async def test_a_program_that_is_not_there(self) -> None:
        for message in await self.refused(Command(["no-such-program"], SECONDS), FailedPrecondition):
            self.assertIn("the program no-such-program is missing; install", message)

    async def test_a_program_that_can_not_be_executed(self) -> None:
        plain = Path(self.directory, "plain")
        plain.write_bytes(b"\x7fnothing")
        plain.chmod(0o755)
        for message in await self.refused(Command([str(plain)], SECONDS), FailedPrecondition):
            self.assertEqual(message, f"{plain} can't be started: {os.strerror(errno.ENOEXEC)}")

    async def test_a_directory_that_is_not_there(self) -> None:
        command = Command(["true"], SECONDS, directory=f"{self.directory}/none")
        for message in await self.refused(command, FailedPrecondition):
            self.assertEqual(message, f"true can't be started: {self.directory}/none: no such directory")

    async def test_a_kernel_that_starts_no_program_now(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.addCleanup(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        for way in (
            lambda: Running(reactor, Command(["true"], SECONDS)),
            lambda: thd_run(Command(["true"], 1.0)),
        ):
            with self.assertRaises(Unavailable) as caught:
                way()
            self.assertIn("true can't be started", str(caught.exception))

    async def test_at_its_deadline_it_is_killed_with_its_group_whatever_it_ignores(self) -> None:
        command = attrs.evolve(sh(f"echo so far >&2; {STUBBORN}", 0.2), directory=self.directory)
        for message in await self.refused(command, DeadlineExceeded):
            self.assertIn("did not end in 0.2 s and was killed", message)
            self.assertIn("so far", message)
        await self.gone(4)

    async def gone(self, number: int) -> None:
        """Wait until the processes that a stubborn program noted have ended."""
        pids = Path(self.directory, "pids").read_text().split()
        self.assertEqual(len(pids), number)
        await until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), "all are killed")

    async def test_a_daemon_that_it_leaves_behind_is_not_waited_for(self) -> None:
        self.patch(commands, "DRAIN_SECONDS", 0.05)
        output = await self.both(sh("sleep 3661.5 & echo begun"))
        self.assertEqual((output.code, output.stdout), (0, b"begun\n"))
        left = pids_by_argument(["3661.5"])["3661.5"]
        self.assertEqual(len(left), 2)  # it goes on
        for pid in left:
            os.kill(pid, 9)

    async def test_what_it_writes_goes_to_a_file_that_it_is_given(self) -> None:
        file = os.memfd_create("output")
        self.addCleanup(os.close, file)
        output = await self.both(
            attrs.evolve(sh("echo out; echo err >&2; sleep 3661.75 & exit 6"), output=file)
        )
        self.assertEqual((output.code, output.stdout, output.stderr), (6, b"", b""))
        self.assertEqual(os.pread(file, 100, 0), b"out\nerr\n" * 2)
        for pid in pids_by_argument(["3661.75"])["3661.75"]:
            os.kill(pid, 9)

    async def test_a_descriptor_that_it_is_given_and_no_other(self) -> None:
        secret, other = os.memfd_create("secret"), os.memfd_create("other")
        self.addCleanup(os.close, secret)
        self.addCleanup(os.close, other)
        os.set_inheritable(other, True)
        os.write(secret, b"kept")
        script = f"cat /proc/self/fd/{secret}; ls /proc/self/fd | grep -cx {other}"
        output = await self.both(attrs.evolve(sh(script), inherited=(secret,)))
        self.assertEqual(output.stdout, b"kept0\n")

    async def test_its_surroundings(self) -> None:
        command = sh('echo "$PATH $LC_ALL $MORE"; pwd; cat; cut -d" " -f5 /proc/$$/stat >group; echo $$ >pid')
        command = attrs.evolve(command, environment={"MORE": "more"}, stdin=b"x", directory=self.directory)
        for way in (as_run, as_thread):
            output = await way(command)
            self.assertEqual(output.stdout.decode(), f"{commands.PATH} C.UTF-8 more\n{self.directory}\nx")
            group, pid = (Path(self.directory, name).read_text() for name in ("group", "pid"))
            self.assertEqual(group, pid)  # it leads a group of its own


class CheckTests(TestCase):
    """Programs that must succeed: `check`, `thd_check`."""

    async def failed(self, command: Command, kind: type[InfranetesError] = InfranetesError) -> str:
        """Return the message of a command's failure, which is the same for both ways."""
        first = str(await self.assertFailure(start(check(reactor, command)), kind))
        second = str(await self.assertFailure(start(run_in_thread(reactor, thd_check, command)), kind))
        self.assertEqual(first, second)
        return first

    async def test_what_it_said(self) -> None:
        self.assertEqual(await check(reactor, sh("echo said; echo warned >&2")), b"said\n")
        self.assertEqual(await run_in_thread(reactor, thd_check, sh("echo said; echo warned >&2")), b"said\n")

    async def test_a_failure_names_the_program_how_it_ended_and_what_it_said_last(self) -> None:
        self.assertEqual(
            await self.failed(Command(["sh", "-c", "echo first; echo last >&2; exit 3"], SECONDS)),
            "`sh -c echo first; echo last >&2; exit 3` ended with exit code 3: last",
        )
        self.assertEqual(await self.failed(sh("kill $$")), "`sh -c kill $$` was killed by SIGTERM: no output")

    @needs_netns
    async def test_a_failure_has_its_words(self) -> None:
        self.assertIn("nosuch0", await self.failed(Command(["ip", "link", "show", "nosuch0"], SECONDS)))

    async def test_no_part_of_an_answer_is_taken_for_the_whole(self) -> None:
        message = await self.failed(attrs.evolve(sh("echo 123456789"), most=9), ResourceExhausted)
        self.assertEqual(message, "`sh -c echo 123456789` said over 9 bytes")

    async def test_a_secret_among_its_arguments_is_not_told(self) -> None:
        self.assertNotIn("Planted1", await self.failed(sh("false --password=Planted1; exit 1")))


class CancelTests(TestCase):
    """Programs that nobody waits for any more."""

    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="commands-"))
        self.addCleanup(shutil.rmtree, self.directory)

    def processes(self) -> list[str]:
        noted = self.directory / "pids"
        return noted.read_text().split() if noted.exists() else []

    async def begun(self) -> Deferred[Output]:
        """Return a run of a program that ignores SIGTERM and has a child, once both are there."""
        running = start(run(reactor, attrs.evolve(sh(STUBBORN, None), directory=str(self.directory))))
        await until(lambda: len(self.processes()) == 2, "the program has begun")
        return running

    async def test_a_cancelled_run_kills_the_whole_group_and_ends_after_it(self) -> None:
        running = await self.begun()
        running.cancel()
        await self.assertFailure(running, CancelledError)
        leader, child = self.processes()
        self.assertFalse(os.path.exists(f"/proc/{leader}"))
        await until(lambda: not os.path.exists(f"/proc/{child}"), "init has reaped the child")

    async def test_a_run_that_is_cancelled_twice_still_ends_after_its_program(self) -> None:
        running = await self.begun()
        running.cancel()
        running.cancel()
        await self.assertFailure(running, CancelledError)
        self.assertFalse(os.path.exists(f"/proc/{self.processes()[0]}"))

    async def test_a_program_that_even_sigkill_does_not_end_is_not_waited_for_long(self) -> None:
        self.patch(commands, "KILLED_SECONDS", 0.1)
        self.patch(commands, "kill_family", lambda pid: None)  # as in the kernel's uninterruptible sleep
        running = Running(reactor, Command(["cat"], None, b"x"))
        pipe = Running(reactor, sh("exec sleep 3662", None))
        await pipe.stop()
        self.assertFalse(pipe.ended.happened)
        (pid,) = pids_by_argument(["3662"])["3662"]
        os.kill(pid, 9)
        self.assertEqual((await pipe.ended.wait()).code, -9)  # its end is seen all the same
        self.assertEqual((await running.ended.wait()).stdout, b"x")

    async def test_a_program_that_has_ended_is_not_killed(self) -> None:
        running = Running(reactor, Command(["true"], None))
        await running.ended.wait()
        self.patch(commands, "kill_family", self.fail)
        running.kill()
        await running.stop()


class _Interrupted(Exception):
    """What a signal raises here."""


class InterruptedThreadTests(SynchronousTestCase):
    """A wait in a thread that a signal's handler ends, as that of Ctrl-C does."""

    def test_it_kills_the_program(self) -> None:
        def raised(number: int, frame: FrameType | None) -> None:
            raise _Interrupted

        main = threading.get_ident()

        def waits() -> bool:
            frames = traceback.walk_stack(sys._current_frames()[main])
            return any(frame.f_code is commands._thd_waited.__code__ for frame, _ in frames)

        def interrupt() -> None:
            deadline = time.monotonic() + SECONDS
            # Not as soon as the program is there: Popen's own constructor may not have returned by then.
            while not waits() and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGUSR1)

        self.addCleanup(signal.signal, signal.SIGUSR1, signal.signal(signal.SIGUSR1, raised))
        thread = threading.Thread(target=interrupt)
        thread.start()
        with self.assertRaises(_Interrupted):
            thd_run(Command(["sleep", "3663.5"], None))
        thread.join()
        self.assertEqual(pids_by_argument(["3663.5"]), {})


class OutputTests(SynchronousTestCase):
    """What is told of a program's words and of its program."""

    def test_the_end_of_long_words_has_no_half_of_a_secret(self) -> None:
        words = f"{'word ' * 300}GET /?token={'Planted' * 100} failed"
        for output in (Output(1, b"", words.encode()), Output(1, words.encode(), b"")):
            self.assertEqual(output.message().replace("word ", ""), "GET /?token=(hidden) failed")
        url = f"GET https://b.example/?X-Amz-Security-Token={'Planted' * 200}&x=1"
        self.assertEqual(Output(1, b"", url.encode()).message(), "(hidden)&x=1")

    def test_a_program_that_is_not_there_is_named(self) -> None:
        with self.assertRaises(FailedPrecondition) as caught:
            commands.find_program("no-such-program")
        self.assertIn("no-such-program", str(caught.exception))

    def test_a_signal_without_a_name_has_its_number(self) -> None:
        self.assertEqual(commands.how_it_ended(-250), "was killed by signal 250")

    def test_shells_tell_a_signal_by_128_and_its_number(self) -> None:
        self.assertEqual([commands.shell_code(code) for code in (0, 3, 255, -9)], [0, 3, 255, 137])


class PathTests(SynchronousTestCase):
    def test_programs_of_ones_own_are_found_before_the_systems(self) -> None:
        """Told by the environment, as the unit of a tree in /opt does."""
        program = "from infranetes_common import commands; print(commands.PATH, commands.ENVIRONMENT['PATH'])"
        environment = {**os.environ, "INFRANETES_PROGRAMS": "/opt/infranetes/1/usr/bin"}
        said = subprocess.run(
            [sys.executable, "-c", program],
            check=True,
            capture_output=True,
            text=True,
            env=environment,
            cwd=Path(commands.__file__).parents[1],
        ).stdout.split()
        self.assertEqual(said, [f"/opt/infranetes/1/usr/bin:{commands.PATH}"] * 2)
