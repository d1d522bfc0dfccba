# SPDX-License-Identifier: Apache-2.0
"""What a pod asks of a guest whose only agent is QEMU's."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TypeVar, cast

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase
from zope.interface.verify import verifyObject

from infranetes.machines.agentless.access import GuestFile, IGuestAccess
from infranetes.machines.agentless.guest_agent.access import GuestAgentAccess
from infranetes.machines.agentless.guest_agent.commands import MAX_ARGUMENTS, MAX_STDIN
from infranetes.machines.sessions import SessionCall
from infranetes_common.concurrency import Coro, start
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    NotOffered,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.reactors import IReactor
from infranetes_common.wire import vmserver
from tests.infranetes.machines.agentless.guest_agent.stand_in import (
    SILENT,
    Programs,
    Refused,
    StandInAgent,
    ended,
)

T = TypeVar("T")
Input = vmserver.SessionInput
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAbc infranetes"


class AccessCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(1_000_000.0)
        self.agent = StandInAgent()
        self.programs = Programs(self.agent)
        self.access = GuestAgentAccess(cast(IReactor, self.clock), self.agent, "sandbox 1")
        self.addCleanup(self._close)

    def _close(self) -> None:
        self.successResultOf(start(self.access.close()))
        self.wait(200)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def wait(self, seconds: float) -> None:
        self.clock.pump([0.05] * round(seconds * 20))

    def result(self, work: Coro[T], seconds: float = 5.0) -> T:
        deferred = start(work)
        self.wait(seconds)
        return self.successResultOf(deferred)

    def failure(self, work: Coro[T], kind: type[InfranetesError], seconds: float = 5.0) -> str:
        deferred = start(work)
        self.wait(seconds)
        return str(self.failureResultOf(deferred, kind).value)

    def run_(
        self,
        *command: str,
        seconds: int = 10,
        limit: float = 0.0,
        max_output: int = 1 << 20,
        stdin: bytes = b"",
    ) -> Coro[vmserver.ExecSyncResponse]:
        return self.access.run(command, seconds, limit, max_output, stdin)


class RunTests(AccessCase):
    """Commands to their end."""

    def test_it_is_what_its_interface_says(self) -> None:
        verifyObject(IGuestAccess, self.access)

    def test_a_command_has_its_input_and_its_outputs_and_code_come_back(self) -> None:
        self.programs.at_once = ended(7, b"out\0\xff", b"err")
        result = self.result(self.run_("cat", "-", stdin=b"in\0"))
        self.assertEqual((result.stdout, result.stderr, result.exit_code), (b"out\0\xff", b"err", 7))
        self.assertEqual(self.programs.started, [(["cat", "-"], b"in\0")])

    def test_a_short_one_is_there_within_a_tenth_of_a_second_and_a_long_one_is_looked_for_once_a_second(
        self,
    ) -> None:
        self.programs.at_once = ended()
        self.result(self.run_("true"), 0.1)
        self.programs.at_once = None
        running = start(self.run_("sleep", seconds=0, limit=10_000.0))
        self.wait(100)
        before = len(self.agent.asked)
        self.wait(100)
        self.assertIn(len(self.agent.asked) - before, range(95, 105))
        self.programs.end(101, 3)
        self.wait(1.1)
        self.assertEqual(self.successResultOf(running).exit_code, 3)

    def test_no_more_output_is_kept_than_is_asked_for(self) -> None:
        for size in (5, 100_000):
            self.programs.at_once = ended(0, b"o" * (size + 1), b"e" * (size + 1))
            result = self.result(self.run_("x", max_output=size))
            self.assertEqual((result.stdout, result.stderr), (b"o" * size, b"e" * size))

    def test_signals_and_windows_codes(self) -> None:
        for told, code in (
            ({"exited": True, "signal": 9}, 137),
            ({"exited": True, "signal": 0xC0000005}, 0xC0000005 - 2**32),
            ({"exited": True, "exitcode": 0xC0000005}, 0xC0000005 - 2**32),
            ({"exited": True, "exitcode": -1}, -1),
            ({"exited": True}, 0),
        ):
            self.programs.at_once = told
            self.assertEqual(self.result(self.run_("x")).exit_code, code)

    def test_output_that_the_agent_has_cut_is_said(self) -> None:
        for more in ({"out-truncated": True}, {"err-truncated": True}):
            self.programs.at_once = ended(0, b"out", b"err", **more)
            self.assertRegex(self.result(self.run_("x")).stderr, b"^errinfranetes: .*16 MiB.*missing\n$")
            self.assertEqual(len(self.result(self.run_("x", max_output=10)).stderr), 10)
        self.programs.at_once = ended(0, b"out", b"err", **{"out-truncated": False})
        self.assertEqual(self.result(self.run_("x")).stderr, b"err")

    def test_a_guest_without_a_shell_has_its_commands_as_they_are(self) -> None:
        self.programs.at_once = ended(5)
        for missing, way in (
            (set[str](), "setsid"),
            ({"setsid"}, "/bin/sh"),
            ({"setsid", "/bin/sh"}, "cmd.exe"),
        ):
            self.programs.missing = missing
            self.agent.lose()
            self.result(self.access.answers(1))
            for _ in range(2):
                asked = self.agent.commands.count("guest-exec")
                self.assertEqual(self.result(self.run_("cmd.exe", "/c", "ver")).exit_code, 5)
                self.assertEqual((self.programs.ways[-1], self.programs.commands[-1][0]), (way, "cmd.exe"))
            self.assertEqual(self.agent.commands.count("guest-exec"), asked + 1)

    def test_there_programs_that_are_missing_or_may_not_be_executed_are_as_in_a_shell(self) -> None:
        self.programs.missing = {"setsid", "/bin/sh", "nope"}
        result = self.result(self.run_("nope"))
        self.assertEqual((result.exit_code, result.stderr), (127, b"nope: No such file or directory\n"))
        self.programs.refusal = Refused("Failed to execute child process “/etc” (Permission denied)")
        result = self.result(self.run_("/etc", max_output=10))
        self.assertEqual((result.exit_code, result.stderr), (126, b"/etc: Perm"))

    def test_a_guest_that_allows_no_commands_is_said_with_what_to_do(self) -> None:
        self.programs.refusal = Refused("Command guest-exec has been disabled", "CommandNotFound")
        text = self.failure(self.run_("true"), NotOffered)
        self.assertIn("guest-exec", text)
        self.assertIn("SSH", text)

    def test_a_refusal_says_nothing_that_people_can_t_read(self) -> None:
        self.programs.refusal = Refused("\x1b[2J\n\0" + "x" * 900)
        text = self.failure(self.run_("true"), FailedPrecondition)
        self.assertTrue(text.isprintable())
        self.assertLess(len(text), 500)

    def test_commands_that_are_none(self) -> None:
        for command in ((), ("",), ("a\0b",), ("a", "\udcff"), ("x", "y" * MAX_ARGUMENTS)):
            self.failure(self.run_(*command), InvalidArgument)
        self.failure(self.run_("cat", stdin=b"x" * (MAX_STDIN + 1)), ResourceExhausted)
        self.assertEqual(self.agent.connections, 0)


class KillTests(AccessCase):
    """A command ends when nobody wants its end any more."""

    def test_out_of_time_it_is_killed(self) -> None:
        running = start(self.run_("sleep", "100", seconds=2))
        self.wait(1.9)
        self.assertNoResult(running)
        self.wait(0.2)
        error = self.failureResultOf(running, DeadlineExceeded).value
        self.assertEqual(str(error), "the command was killed: it did not end within 2 s")
        self.wait(5)
        self.assertEqual((self.programs.killed, self.programs.running), ([100], {}))

    def test_so_it_is_when_the_call_gives_up(self) -> None:
        self.failure(self.run_("sleep", seconds=0, limit=3.0), DeadlineExceeded)
        self.assertEqual(self.programs.killed, [100])

    def test_cancelled_it_is_killed(self) -> None:
        running = start(self.run_("sleep"))
        self.wait(1)
        running.cancel()
        self.failureResultOf(running, CancelledError)
        self.wait(5)
        self.assertEqual((self.programs.killed, self.programs.running), ([100], {}))

    def test_cancelled_while_it_starts_it_is_killed_once_it_has(self) -> None:
        self.agent.always("guest-exec", SILENT)
        running = start(self.run_("sleep"))
        running.cancel()
        self.failureResultOf(running, CancelledError)
        Programs._exec(self.programs, {"path": "sleep", "arg": []})
        self.agent.handlers["guest-exec"] = self.programs._exec
        self.agent.answer({"pid": 100})
        self.wait(5)
        self.assertEqual((self.programs.killed, self.programs.running), ([100], {}))

    def test_cancelled_before_its_turn_it_never_starts(self) -> None:
        self.agent.always("guest-info", SILENT)
        info, running = start(self.access.commands()), start(self.run_("sleep"))
        running.cancel()
        self.failureResultOf(running, CancelledError)
        self.agent.answer({"supported_commands": []})
        self.wait(5)
        self.successResultOf(info)
        self.assertEqual(self.programs.started, [])

    def test_on_windows_by_its_own_program(self) -> None:
        self.agent.always("guest-get-osinfo", {"id": "mswindows"})
        self.failure(self.run_("sleep", seconds=1), DeadlineExceeded)
        self.assertEqual(self.programs.commands[1], ["taskkill", "/T", "/F", "/PID", "100"])

    def test_an_agent_that_hangs_does_not_keep_the_caller_waiting(self) -> None:
        self.agent.always("guest-exec-status", SILENT)
        self.failure(self.run_("sleep", seconds=1), DeadlineExceeded, 1.1)


class LossTests(AccessCase):
    """Connections and agents come and go while a command runs."""

    def test_a_lost_connection_is_not_the_commands_end(self) -> None:
        running = start(self.run_("sleep", seconds=100))
        self.wait(5)
        self.agent.lose()
        self.agent.refusing = True
        self.wait(20)
        self.agent.refusing = False
        self.wait(6)
        self.programs.end(100, 5)
        self.wait(2)
        self.assertEqual(self.successResultOf(running).exit_code, 5)

    def test_after_a_minute_it_is(self) -> None:
        running = start(self.run_("sleep", seconds=1000))
        self.wait(5)
        self.agent.lose()
        self.agent.refusing = True
        self.wait(70)
        self.failureResultOf(running, Unavailable)

    def test_an_agent_that_was_started_again_does_not_know_the_command(self) -> None:
        running = start(self.run_("sleep"))
        self.programs.running.clear()
        self.wait(1)
        error = self.failureResultOf(running, Unavailable).value
        self.assertIn("started again", str(error))

    def test_much_input_is_given_the_time_that_it_takes(self) -> None:
        self.agent.always("guest-exec", SILENT)
        running = start(self.run_("cat", seconds=1000, stdin=b"x" * MAX_STDIN))
        self.wait(90)
        self.programs.running[7] = ended(3)
        self.agent.answer({"pid": 7})
        self.wait(1)
        self.assertEqual(self.successResultOf(running).exit_code, 3)


class HostileTests(AccessCase):
    """Answers that are JSON and nonsense."""

    def test_starts_that_are_none(self) -> None:
        values: list[object] = [None, 1, [], {}]
        values += [{"pid": pid} for pid in (None, "1", -1, 2**70, 1.5, True)]
        for value in values:
            with self.subTest(value=value):
                self.agent.always("guest-exec", value)
                self.failure(self.run_("x"), Unavailable)
                self.wait(61)

    def test_ends_that_are_none(self) -> None:
        values: list[object] = [
            7,
            {"exited": True, "exitcode": 2**40},
            {"exited": True, "exitcode": "0"},
            {"exited": True, "signal": -9},
            {"exited": True, "signal": 2**70},
            {"exited": True, "exitcode": 0, "out-data": 5},
            {"exited": True, "exitcode": 0, "err-data": "no base64!"},
            b"[" * 10_000 + b"\n",
        ]
        for value in values:
            with self.subTest(value=value):
                self.agent.always("guest-exec-status", value)
                self.failure(self.run_("x", seconds=200), Unavailable, 130)
                self.agent.handlers["guest-exec-status"] = self.programs._status
                self.wait(61)

    def test_an_end_that_never_comes_is_waited_for_no_longer_than_asked(self) -> None:
        for value in ({}, {"exited": 1}, {"exited": "true"}, {"exited": None}):
            self.agent.always("guest-exec-status", value)
            self.failure(self.run_("x", seconds=2), DeadlineExceeded)

    def test_lists_and_systems_that_are_none(self) -> None:
        lists: list[object] = [7, {}, {"supported_commands": {}}, {"supported_commands": [1]}]
        for value in lists:
            self.agent.always("guest-info", value)
            self.failure(self.access.commands(), Unavailable)
            self.wait(61)
        cards: list[object] = [7, [1], [{"ip-addresses": 7}], [{"ip-addresses": [7]}]]
        for value in cards:
            self.agent.always("guest-network-get-interfaces", value)
            self.agent.always("guest-get-osinfo", value)
            self.failure(self.access.cards(), Unavailable)
            self.wait(61)
            self.failure(self.access.system(), Unavailable)
            self.wait(61)


class SessionTests(AccessCase):
    """Exec with streams, as far as there are any."""

    def begin(self, *command: str, stdin: bool = False, tty: bool = False) -> SessionCall:
        call = self.access.session()
        message = vmserver.SessionStart(command=command, stdin=stdin, stdout=True, stderr=True, tty=tty)
        self.successResultOf(start(call.send(Input(start=message))))
        return call

    def outputs(self, call: SessionCall, seconds: float = 5.0) -> Deferred[Sequence[vmserver.SessionOutput]]:
        async def all() -> Sequence[vmserver.SessionOutput]:
            return [each async for each in call]

        found = start(all())
        self.wait(seconds)
        return found

    def summed(self, outputs: Sequence[vmserver.SessionOutput]) -> tuple[bytes, bytes, int]:
        self.assertLessEqual(max(len(each.stdout) + len(each.stderr) for each in outputs), 256 * 1024)
        return (
            b"".join(each.stdout for each in outputs),
            b"".join(each.stderr for each in outputs),
            outputs[-1].end.exit_code,
        )

    def test_without_input_the_command_runs_at_once_and_its_output_comes_at_its_end(self) -> None:
        self.programs.at_once = ended(3, b"o" * 700_000, b"e")
        found = self.summed(self.successResultOf(self.outputs(self.begin("ls", "-l"))))
        self.assertEqual(found, (b"o" * 700_000, b"e", 3))
        self.assertEqual(self.programs.started, [(["ls", "-l"], b"")])

    def test_input_is_collected_to_its_end_and_sizes_of_terminals_are_nothing(self) -> None:
        self.programs.at_once = ended(0, b"done")
        call = self.begin("cat", stdin=True)
        found = self.outputs(call)
        for part in (Input(stdin=b"a"), Input(resize=vmserver.TerminalSize(width=1)), Input(stdin=b"b")):
            self.successResultOf(start(call.send(part)))
        self.wait(5)
        self.assertEqual(self.programs.started, [])
        start(call.done_sending())
        self.wait(5)
        self.assertEqual(self.summed(self.successResultOf(found)), (b"done", b"", 0))
        self.assertEqual(self.programs.started, [(["cat"], b"ab")])

    def test_more_input_than_can_be_sent_is_refused(self) -> None:
        call = self.begin("cat", stdin=True)
        found = self.outputs(call)
        for _ in range(MAX_STDIN // (256 * 1024) + 1):
            start(call.send(Input(stdin=b"x" * 256 * 1024))).addErrback(lambda failure: None)
            self.wait(0.1)
        self.assertIn("SSH", str(self.failureResultOf(found, ResourceExhausted).value))
        self.assertEqual(self.programs.started, [])

    def test_a_terminal_is_not_offered_and_what_is_instead_is_said(self) -> None:
        text = str(
            self.failureResultOf(self.outputs(self.begin("sh", tty=True, stdin=True)), NotOffered).value
        )
        self.assertIn("kubectl attach", text)
        self.assertIn("SSH", text)
        self.assertEqual(self.agent.connections, 0)

    def test_cancelled_its_command_is_killed(self) -> None:
        call = self.begin("sleep")
        self.wait(3)
        call.cancel()
        self.wait(5)
        self.assertEqual(self.programs.killed, [100])

    def test_an_error_is_the_clients(self) -> None:
        self.programs.refusal = Refused("disabled", "CommandNotFound")
        self.failureResultOf(self.outputs(self.begin("ls")), NotOffered)


class FileTests(AccessCase):
    def put(self, *names: str, size: int = 1) -> Coro[None]:
        return self.access.put_files("/run/secrets/x", {name: GuestFile(b"x" * size) for name in names})

    def test_an_archive_goes_to_a_shell(self) -> None:
        self.programs.at_once = ended()
        self.result(self.put("a", "b/c"))
        ((command, archive),) = self.programs.started
        self.assertEqual((command[:2], command[-1]), (["/bin/sh", "-c"], "/run/secrets/x"))
        self.assertIn(b"b/c", archive)

    def test_one_directory_is_brought_after_the_other(self) -> None:
        first, second = start(self.put("a")), start(self.put("b"))
        self.wait(5)
        self.assertEqual(len(self.programs.started), 1)
        self.programs.at_once = ended()
        self.programs.end(100)
        self.wait(5)
        self.successResultOf(first)
        self.successResultOf(second)

    def test_paths_out_of_it_are_refused_before_anything_is_sent(self) -> None:
        self.failure(self.put("../x"), InvalidArgument)
        self.failure(self.access.put_files("relative", {}), InvalidArgument)
        self.assertEqual(self.agent.connections, 0)

    def test_more_than_can_be_sent_is_refused(self) -> None:
        self.failure(self.put("a", "b", size=MAX_STDIN // 2 + 1), ResourceExhausted)

    def test_guests_that_can_t(self) -> None:
        self.programs.at_once = ended(2, b"", b"tar: No space left on device")
        self.failure(self.put("a"), ResourceExhausted)
        self.agent.lose()
        self.agent.always("guest-get-osinfo", {"id": "mswindows"})
        self.result(self.access.answers(1))
        self.assertIn("Windows", self.failure(self.put("a"), NotOffered))
        self.agent.always("guest-get-osinfo", {"id": "tiny"})
        self.programs.missing = {"setsid", "/bin/sh"}
        self.agent.lose()
        self.result(self.access.answers(1))
        self.failure(self.put("a"), NotOffered)


class UsageTests(AccessCase):
    def test_a_linux_is_measured(self) -> None:
        stat = b"/proc/stat:cpu  1000 200 300 40000 50 6 7 80 0 0\n/proc/meminfo:MemTotal:  524288 kB\n"
        self.programs.at_once = ended(2, stat)
        usage = self.result(self.access.usage())
        self.assertEqual(usage.machine.cpu.total_nanos, 15_130_000_000)
        self.assertEqual(usage.machine.memory.limit, 512 << 20)
        self.assertEqual(usage.machine.time_nanos // 10**9, 1_000_000)

    def test_anything_else_is_not(self) -> None:
        self.programs.at_once = ended(0, b"hello")
        self.failure(self.access.usage(), NotOffered)
        self.programs.at_once = ended(127, b"", b"sh: grep: not found")
        self.failure(self.access.usage(), NotOffered)
        self.programs.refusal = Refused("disabled", "CommandNotFound")
        self.failure(self.access.usage(), NotOffered)


class GuestTests(AccessCase):
    """What else the agent does."""

    def test_what_it_may_do_is_told(self) -> None:
        listed = [{"name": "guest-exec", "enabled": False}, {"name": "guest-ping", "enabled": True}, {}]
        self.agent.always("guest-info", {"supported_commands": listed})
        self.assertEqual(self.result(self.access.commands()), frozenset({"guest-ping"}))

    def test_which_system_it_is_is_asked_once_for_each_conversation(self) -> None:
        for _ in range(3):
            self.assertEqual(self.result(self.access.system()), "debian")
        self.assertEqual(self.agent.commands, ["guest-get-osinfo"])
        self.agent.lose()
        self.result(self.access.answers(1))
        self.agent.always("guest-get-osinfo", {"id": "mswindows"})
        self.assertEqual(self.result(self.access.system()), "mswindows")

    def test_an_early_agent_does_not_know(self) -> None:
        del self.agent.handlers["guest-get-osinfo"]
        self.assertIsNone(self.result(self.access.system()))

    def test_nothing_is_answered_to_powering_off(self) -> None:
        self.agent.always("guest-shutdown", SILENT)
        self.result(self.access.power_off(), 6)
        self.assertEqual(self.agent.asked, [("guest-shutdown", {"mode": "powerdown"})])

        def off(arguments: object) -> object:
            self.agent.lose()
            return SILENT

        self.agent.handlers["guest-shutdown"] = off
        self.wait(1)
        self.result(self.access.power_off(), 1)

    def test_a_refusal_to_power_off_and_an_agent_that_is_not_there_are_failures(self) -> None:
        self.failure(self.access.power_off(), NotOffered)
        self.agent.lose()
        self.agent.present = False
        self.failure(self.access.power_off(), Unavailable, 20)

    def test_a_key_is_added(self) -> None:
        command = "guest-ssh-add-authorized-keys"
        self.agent.always(command, {})
        self.result(self.access.add_ssh_key("root", KEY))
        self.assertEqual(self.agent.asked, [(command, {"username": "root", "keys": [KEY]})])
        for user, key in (("", KEY), ("../x", KEY), ("root", ""), ("root", KEY + "\n" + KEY), ("root", "ü")):
            self.failure(self.access.add_ssh_key(user, key), InvalidArgument)
        self.assertEqual(len(self.agent.asked), 1)

    def test_the_clock_is_set_also_where_its_hardware_can_t_be(self) -> None:
        self.agent.always("guest-set-time", {})
        self.result(self.access.set_time(10**18))
        self.assertEqual(self.agent.asked, [("guest-set-time", {"time": 10**18})])

        def no_hwclock(arguments: dict[str, object]) -> object:
            raise Refused("hwclock failed to set hardware clock to system time")

        self.agent.handlers["guest-set-time"] = no_hwclock
        self.agent.always("guest-get-time", 10**18 + 10**9)
        self.result(self.access.set_time(10**18))
        self.agent.always("guest-get-time", 10**18 - 10**11)
        self.assertIn("hwclock", self.failure(self.access.set_time(10**18), FailedPrecondition))

    def test_addresses_are_listed_and_what_are_none_left_out(self) -> None:
        self.agent.handlers["guest-network-get-interfaces"] = lambda arguments: [
            {"name": "eth0", "hardware-address": "52:54:00:00:00:01", "ip-addresses": [
                {"ip-address": "10.85.0.5", "prefix": 24, "ip-address-type": "ipv4"},
                {"ip-address": "fe80::1%eth0", "prefix": 64},
                {"ip-address": "10.85.0.300", "prefix": 24}, {"ip-address": "::", "prefix": 2**70},
                {"ip-address": 7, "prefix": 1}, {"ip-address": "::1"}]},
            {"name": "x" * 5000 + "\n"},
        ]  # fmt: skip
        first, second = self.result(self.access.cards())
        self.assertEqual((first.name, first.mac), ("eth0", "52:54:00:00:00:01"))
        self.assertEqual([str(each) for each in first.addresses], ["10.85.0.5/24", "fe80::1/64"])
        self.assertLess(len(second.name), 400)

    def test_file_systems_stand_and_go_on(self) -> None:
        self.agent.always("guest-fsfreeze-freeze", 3)
        self.agent.always("guest-fsfreeze-thaw", 3)
        self.assertEqual(self.result(self.access.freeze()), 3)
        self.result(self.access.thaw())

    def test_a_freeze_that_is_cancelled_or_not_answered_is_undone(self) -> None:
        self.agent.always("guest-fsfreeze-freeze", SILENT)
        self.agent.always("guest-fsfreeze-thaw", 3)
        freezing = start(self.access.freeze())
        freezing.cancel()
        self.failureResultOf(freezing, CancelledError)
        self.agent.answer(3)
        self.wait(5)
        self.assertEqual(self.agent.commands[-1], "guest-fsfreeze-thaw")
        self.failure(self.access.freeze(), Unavailable, 70)
        self.wait(10)
        self.assertEqual(self.agent.commands[-1], "guest-fsfreeze-thaw")

    def test_while_they_stand_nothing_else_can_be_asked_now(self) -> None:
        self.programs.refusal = Refused(
            "Command guest-exec has been disabled: the agent is in frozen state", "CommandNotFound"
        )
        self.assertIn("frozen", self.failure(self.run_("true"), Unavailable))


class LargeTests(AccessCase):
    def test_sixteen_mib_of_output_come_back(self) -> None:
        data = base64.b64encode(b"\x01\x02\x03" * (1 << 20) * 5)
        status = b'{"return": {"exited": true, "exitcode": 0, "out-data": "' + data + b'"}}\n'

        def in_pieces(arguments: dict[str, object]) -> object:
            for at in range(0, len(status), 65536):
                self.agent.send(status[at : at + 65536])
            return SILENT

        self.agent.handlers["guest-exec-status"] = in_pieces
        result = self.result(self.run_("x", max_output=16 << 20))
        self.assertEqual(result.stdout, b"\x01\x02\x03" * (1 << 20) * 5)
