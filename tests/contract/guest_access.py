# SPDX-License-Identifier: Apache-2.0
"""The contract of every `IGuestAccess`: what runs commands in a guest without our agent, and brings it files.

Whatever is looked at in the guest is looked at through the access itself, so that the guest may be a VM.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase
from zope.interface.verify import verifyObject

from infranetes.machines.agentless.access import GuestFile, IGuestAccess
from infranetes.machines.sessions import SessionCall
from infranetes_common.concurrency import Coro
from infranetes_common.errors import (
    DeadlineExceeded,
    InfranetesError,
    InvalidArgument,
    NotOffered,
    Unavailable,
    code_of,
)
from infranetes_common.reactors import installed
from infranetes_common.wire import vmserver
from txgrpc import Code, GrpcError

reactor = installed()
T = TypeVar("T")
MIB = 1024 * 1024
BINARY = bytes(range(256)) * 64

if TYPE_CHECKING:
    _Base = TestCase
else:
    _Base = object


class Heard:
    """Reads a session's output as it arrives."""

    def __init__(self, call: SessionCall) -> None:
        self.call = call
        self.out, self.err = bytearray(), bytearray()
        self.over = Deferred.fromCoroutine(self._read())

    async def _read(self) -> int:
        code: int | None = None
        async for message in self.call:
            self.out += message.stdout
            self.err += message.stderr
            if message.WhichOneof("output") == "end":
                code = message.end.exit_code
        assert code is not None, "a session ended without an exit code"
        return code


class GuestAccessContract(_Base):
    """A Linux guest with a shell.

    :cvar terminals: whether sessions may have one. :cvar live: whether a session's input reaches the command
        while it runs.
    """

    terminals: ClassVar[bool] = True
    live: ClassVar[bool] = True
    call_seconds: ClassVar[float] = 60.0  # that a call may take
    timeout = 120.0

    # Hooks

    async def make_access(self) -> IGuestAccess:
        """Return the access to a guest that runs. Called once for a test, which closes what is returned."""
        raise NotImplementedError

    async def cut(self) -> None:
        """Break off the connection from the other side, or the guest's end of it; a new one can be made."""
        raise NotImplementedError

    # Helpers

    async def setUp(self) -> None:
        self.access = await self.make_access()
        self.addCleanup(lambda: Deferred.fromCoroutine(self.access.close()))
        self.directory = f"/tmp/guest-access-{secrets.token_hex(6)}"

    async def timed(self, work: Coro[T]) -> T:
        """Await a call, for at most as long as one may take."""
        return await Deferred.fromCoroutine(work).addTimeout(self.call_seconds, reactor)

    async def exec(
        self, *command: str, stdin: bytes = b"", seconds: int = 0, most: int = MIB
    ) -> vmserver.ExecSyncResponse:
        return await self.timed(self.access.run(command, seconds, self.call_seconds, most, stdin))

    async def shell(self, script: str, **options: Any) -> vmserver.ExecSyncResponse:
        return await self.exec("sh", "-c", script, **options)

    async def refused(self, kind: type[InfranetesError], work: Coro[Any]) -> str:
        """Check that a call fails with this kind of error; return its message."""
        try:
            await self.timed(work)
        except InfranetesError as error:
            self.assertIsInstance(error, kind, str(error))
            return str(error)
        raise AssertionError(f"no {kind.__name__}")

    async def until(self, condition: Callable[[], Awaitable[bool]], what: str) -> None:
        """Wait until a condition holds."""
        deadline = reactor.seconds() + self.call_seconds
        while not await condition():
            self.assertLess(reactor.seconds(), deadline, f"not {what}")
            await deferLater(reactor, 0.05, lambda: None)

    async def running(self, marker: str) -> int:
        """Return how many processes of the guest are `sleep MARKER`."""
        found = await self.shell(f"pgrep -xf 'sleep {marker}' | wc -l")
        return int(found.stdout)

    async def is_over(self, marker: str) -> None:
        async def over() -> bool:
            return await self.running(marker) == 0

        await self.until(over, "the command is over")

    def marker(self) -> str:
        """Return a number of seconds that nobody else sleeps for."""
        return f"6{secrets.randbelow(10**6):06}"

    # What it is

    async def test_it_provides_the_whole_interface(self) -> None:
        verifyObject(IGuestAccess, self.access)
        self.assertIn(self.access.name, ("ssh", "guest-agent"))

    async def test_a_guest_that_is_there_answers(self) -> None:
        for _ in range(2):
            await self.timed(self.access.answers(self.call_seconds))

    # Commands

    async def test_both_streams_and_the_exit_code(self) -> None:
        for _ in range(2):
            result = await self.shell("echo out; echo err >&2; exit 3")
            self.assertEqual((result.stdout, result.stderr, result.exit_code), (b"out\n", b"err\n", 3))

    async def test_arguments_arrive_as_they_are(self) -> None:
        words = [
            "", " ", "two words", "it's", '"', "\\", "$HOME", "`id`", "a\nb", "*", "~", "!x", "%PATH%", "-n",
            "ä€😀", "a;b|c&d>e<f(g)", "#", "=",
        ]  # fmt: skip
        result = await self.exec("sh", "-c", 'for each do printf "%s|" "$each"; done', "sh", *words)
        self.assertEqual(result.stdout.decode(), "|".join([*words, ""]))

    async def test_an_argument_that_no_command_can_have_is_refused(self) -> None:
        await self.refused(InvalidArgument, self.access.run(["echo", "a\0b"], 5, 5, 100))

    async def test_commands_run_as_root(self) -> None:
        self.assertEqual((await self.exec("id", "-u")).stdout, b"0\n")

    async def test_stdin_and_its_end_arrive_byte_for_byte(self) -> None:
        result = await self.exec("cat", stdin=BINARY)
        self.assertEqual((result.stdout == BINARY, result.exit_code), (True, 0))
        self.assertEqual((await self.exec("cat")).stdout, b"")

    async def test_a_command_need_not_read_its_stdin(self) -> None:
        self.assertEqual((await self.exec("true", stdin=bytes(MIB))).exit_code, 0)

    async def test_a_program_that_is_missing_is_127_and_named(self) -> None:
        for command in ("/no/such/program", "no-such-program"):
            result = await self.exec(command, "argument")
            self.assertEqual(result.exit_code, 127)
            self.assertIn(command.encode(), result.stderr)

    async def test_a_file_that_is_no_program_is_126(self) -> None:
        for command in ("/etc/passwd", "/etc"):
            result = await self.exec(command)
            self.assertEqual(result.exit_code, 126)
            self.assertTrue(result.stderr)

    async def test_a_signal_is_128_and_its_number(self) -> None:
        self.assertEqual((await self.shell("kill -9 $$")).exit_code, 137)
        self.assertEqual((await self.shell("kill -15 $$")).exit_code, 143)

    async def test_output_beyond_what_is_asked_for_is_dropped_and_the_command_ends(self) -> None:
        script = "head -c 3000000 /dev/zero; head -c 300000 /dev/zero >&2; exit 4"
        result = await self.shell(script, most=1000)
        self.assertEqual((len(result.stdout), len(result.stderr), result.exit_code), (1000, 1000, 4))

    async def test_a_command_that_takes_too_long_is_killed_with_what_it_started(self) -> None:
        for seconds, limit in ((1, 60.0), (0, 1.0)):
            marker = self.marker()
            script = f"sleep {marker} & sleep {marker}; true"
            await self.refused(DeadlineExceeded, self.access.run(["sh", "-c", script], seconds, limit, 1000))
            await self.is_over(marker)
        self.assertEqual((await self.exec("true")).exit_code, 0)

    async def test_a_call_that_is_cancelled_ends_its_command(self) -> None:
        marker = self.marker()
        running = Deferred.fromCoroutine(self.access.run(["sleep", marker], 0, 600, 1000))
        running.addErrback(lambda failure: None)

        async def begun() -> bool:
            return await self.running(marker) == 1

        await self.until(begun, "the command runs")
        running.cancel()
        await self.is_over(marker)

    async def test_a_process_left_behind_holds_up_nobody(self) -> None:
        marker = self.marker()
        result = await self.shell(f"sleep {marker} & echo left")
        self.assertEqual((result.stdout, result.exit_code), (b"left\n", 0))
        await self.exec("pkill", "-xf", f"sleep {marker}")

    async def test_many_at_once(self) -> None:
        running = [
            Deferred.fromCoroutine(self.shell(f"echo {number}; sleep 0.1; exit {number}"))
            for number in range(20)
        ]
        for number, each in enumerate(running):
            result = await each
            self.assertEqual((result.stdout, result.exit_code), (b"%d\n" % number, number))

    # Sessions

    async def begin(self, *command: str, **wanted: Any) -> Heard:
        """Begin a session; by default with all streams and without a terminal."""
        streams = {"stdin": True, "stdout": True, "stderr": not wanted.get("tty"), **wanted}
        call = self.access.session()
        self.addCleanup(call.cancel)
        start = vmserver.SessionStart(command=command, **streams)
        await self.timed(call.send(vmserver.SessionInput(start=start)))
        heard = Heard(call)
        heard.over.addTimeout(self.call_seconds, reactor)
        return heard

    async def write(self, heard: Heard, data: bytes) -> None:
        await self.timed(heard.call.send(vmserver.SessionInput(stdin=data)))

    async def said(self, heard: Heard, words: bytes) -> None:
        async def there() -> bool:
            return words in heard.out

        await self.until(there, f"{words!r} is written, but {bytes(heard.out[-1000:])!r}")

    async def test_a_session_has_both_streams_and_the_exit_code(self) -> None:
        heard = await self.begin("sh", "-c", "echo out; echo err >&2; exit 3")
        await heard.call.done_sending()
        self.assertEqual(await heard.over, 3)
        self.assertEqual((heard.out, heard.err), (b"out\n", b"err\n"))

    async def test_a_session_has_only_the_streams_that_are_wanted(self) -> None:
        heard = await self.begin("sh", "-c", "cat; echo out; echo err >&2", stdin=False, stdout=False)
        await heard.call.done_sending()
        self.assertEqual(await heard.over, 0)
        self.assertEqual((heard.out, heard.err), (b"", b"err\n"))

    async def test_a_session_s_stdin_and_its_end_arrive_byte_for_byte(self) -> None:
        heard = await self.begin("cat")
        await self.write(heard, BINARY)
        if self.live:
            await self.said(heard, BINARY)
        await self.write(heard, b"again")
        for _ in range(2):
            await heard.call.done_sending()
        self.assertEqual(await heard.over, 0)
        self.assertTrue(heard.out == BINARY + b"again")

    async def test_a_session_of_a_program_that_is_missing_says_so(self) -> None:
        heard = await self.begin("/no/such/program")
        await heard.call.done_sending()
        self.assertEqual(await heard.over, 127)
        self.assertIn(b"/no/such/program", heard.err)

    async def test_a_session_that_a_signal_ends(self) -> None:
        heard = await self.begin("sh", "-c", "kill -9 $$")
        await heard.call.done_sending()
        self.assertEqual(await heard.over, 137)

    async def test_a_session_passes_much_both_ways(self) -> None:
        heard = await self.begin("cat")
        for _ in range(64):
            await self.write(heard, BINARY)
        await heard.call.done_sending()
        self.assertEqual(await heard.over, 0)
        self.assertTrue(heard.out == BINARY * 64, len(heard.out))

    async def test_cancelling_a_session_ends_its_command(self) -> None:
        marker = self.marker()
        heard = await self.begin("sh", "-c", f"sleep {marker} & sleep {marker}; true")
        await heard.call.done_sending()

        async def begun() -> bool:
            return await self.running(marker) == 2

        await self.until(begun, "the commands run")
        for _ in range(2):
            heard.call.cancel()
        with contextlib.suppress(GrpcError):
            await heard.over
        await self.is_over(marker)

    async def test_what_a_client_does_not_read_waits(self) -> None:
        call = self.access.session()
        self.addCleanup(call.cancel)
        start = vmserver.SessionStart(command=["head", "-c", str(4 * MIB), "/dev/zero"], stdout=True)
        await self.timed(call.send(vmserver.SessionInput(start=start)))
        await deferLater(reactor, 0.3, lambda: None)
        heard = Heard(call)
        self.assertEqual(await heard.over, 0)
        self.assertEqual(len(heard.out), 4 * MIB)

    async def test_a_terminal_has_a_type_and_a_size_that_changes(self) -> None:
        script = "read x; echo $TERM; stty size; test -t 0 && test -t 2; exec cat"
        if not self.terminals:
            heard = await self.begin("sh", "-c", script, tty=True)
            with self.assertRaises(NotOffered):
                await heard.over
            return
        heard = await self.begin("sh", "-c", script, tty=True, term="vt220")
        size = vmserver.TerminalSize(width=100, height=30)
        await self.timed(heard.call.send(vmserver.SessionInput(resize=size)))
        await self.write(heard, b"go\n")
        await self.said(heard, b"vt220\r\n30 100\r\n")
        await self.write(heard, b"typed\n")
        await self.said(heard, b"typed\r\ntyped\r\n")
        await heard.call.done_sending()
        self.assertEqual(await heard.over, 0)
        self.assertEqual(heard.err, b"")

    # Files

    async def placed(self, **files: str) -> None:
        """Bring text files of these names."""
        kept = {name: GuestFile(text.encode()) for name, text in files.items()}
        await self.timed(self.access.put_files(self.directory, kept))

    async def listed(self) -> list[str]:
        """List all files below the directory, as programs of the guest see them."""
        found = await self.shell(f"cd {self.directory} && find -L . -type f ! -path '*/..*' | sort")
        return [line[2:] for line in found.stdout.decode().splitlines()]

    async def content(self, path: str) -> bytes:
        return (await self.exec("cat", f"{self.directory}/{path}")).stdout

    async def test_files_are_brought_with_their_content_and_modes(self) -> None:
        files = {
            "key": GuestFile(BINARY, 0o600),
            "empty": GuestFile(b""),
            "deep/er/run": GuestFile(b"#!/bin/sh\necho ran\n", 0o755),
            "-x y'z": GuestFile(b"odd", 0o440),
        }
        for _ in range(2):
            await self.timed(self.access.put_files(self.directory, files))
            self.assertEqual(await self.listed(), sorted(files))
            for path, file in files.items():
                self.assertTrue(await self.content(path) == file.content, path)
                mode = await self.exec("stat", "-L", "-c", "%a %u", f"{self.directory}/{path}")
                self.assertEqual(mode.stdout.decode(), f"{file.mode:o} 0\n", path)
        self.assertEqual((await self.exec(f"{self.directory}/deep/er/run")).stdout, b"ran\n")

    async def test_files_are_changed_and_those_that_are_left_out_are_gone(self) -> None:
        await self.placed(a="1", b="2")
        await self.placed(a="new", c="3")
        self.assertEqual(await self.listed(), ["a", "c"])
        self.assertEqual(await self.content("a"), b"new")
        await self.placed()
        self.assertEqual(await self.listed(), [])

    async def test_a_file_becomes_a_directory_and_back(self) -> None:
        for files in ({"x": GuestFile(b"1")}, {"x/y": GuestFile(b"2")}, {"x": GuestFile(b"3")}):
            await self.timed(self.access.put_files(self.directory, files))
            self.assertEqual(await self.listed(), list(files))

    async def test_nobody_sees_half_a_file(self) -> None:
        size = 300_000
        await self.placed(key="x" * size)
        watch = f"""while [ ! -e {self.directory}/stop ]; do
            wc -c < {self.directory}/key; tr -d xy < {self.directory}/key; done | sort | uniq"""
        watching = Deferred.fromCoroutine(self.shell(watch))
        for text in "yxyx":
            await self.placed(key=text * size)
        await self.placed(key="x" * size, stop="")
        self.assertEqual((await watching).stdout, b"%d\n" % size)

    async def test_a_path_that_leads_out_of_the_directory_is_refused(self) -> None:
        await self.placed(a="1")
        for path in ("../x", "/x", "a/../../x", "", ".", "..", "a//b", "a/", "./a", "a\0b", "x" * 300):
            await self.refused(
                InvalidArgument, self.access.put_files(self.directory, {path: GuestFile(b"x")})
            )
        for directory in ("", "relative", "/", "/tmp/../etc"):
            await self.refused(InvalidArgument, self.access.put_files(directory, {"a": GuestFile(b"x")}))
        self.assertEqual(await self.listed(), ["a"])

    async def test_a_link_that_the_guest_has_put_there_is_not_followed(self) -> None:
        victim = f"{self.directory}-victim"
        await self.shell(f"mkdir -p {victim} {self.directory}; ln -s {victim} {self.directory}/x")
        await self.timed(self.access.put_files(self.directory, {"x/y": GuestFile(b"1")}))
        self.assertEqual((await self.exec("ls", "-A", victim)).stdout, b"")
        self.assertEqual(await self.content("x/y"), b"1")

    async def tearDown(self) -> None:
        with contextlib.suppress(Exception):
            await self.shell(f"rm -rf {self.directory} {self.directory}-victim")

    # Usage

    async def test_it_measures_what_the_guest_uses(self) -> None:
        first = await self.timed(self.access.usage())
        second = await self.timed(self.access.usage())
        for figures in (first.machine, second.machine):
            self.assertGreater(figures.cpu.total_nanos, 0)
            self.assertGreater(figures.memory.limit, figures.memory.working_set)
            self.assertGreater(figures.memory.working_set, 0)
        self.assertGreaterEqual(second.machine.cpu.total_nanos, first.machine.cpu.total_nanos)
        self.assertGreater(second.machine.time_nanos, first.machine.time_nanos)
        self.assertEqual(len(first.containers), 0)

    # Connections

    async def test_after_a_loss_it_is_reached_anew(self) -> None:
        self.assertEqual((await self.exec("true")).exit_code, 0)
        await self.cut()

        async def again() -> bool:
            try:
                return (await self.exec("echo", "again")).stdout == b"again\n"
            except Unavailable:
                return False

        await self.until(again, "the guest answers again")

    async def test_closing_fails_calls_under_way_and_later_ones(self) -> None:
        running = Deferred.fromCoroutine(self.access.run(["sleep", "20"], 0, 60, 1000))
        heard = await self.begin("sleep", "20")
        await deferLater(reactor, 0.3, lambda: None)
        for _ in range(2):
            await self.timed(self.access.close())
        for waiting in (running, heard.over):
            try:
                await waiting
            except (InfranetesError, GrpcError) as error:
                self.assertIs(code_of(error), Code.UNAVAILABLE, str(error))
            else:
                raise AssertionError("it ended as if nothing were")
        await self.refused(Unavailable, self.access.run(["true"], 5, 5, 100))
        await self.refused(Unavailable, self.access.answers(5))
