# SPDX-License-Identifier: Apache-2.0
"""Shell as the node sees it: over mutual TLS, with processes and terminals of this machine."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
from typing import Any

from twisted.internet.task import deferLater
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.reactors import installed
from infranetes_common.wire import vmserver as messages
from tests.contract.container_sessions import living
from tests.support.waiting import until
from tests.vmserver.rpc.test_sessions import SessionCase, stdin
from txgrpc import Code
from vmserver.containers import shell
from vmserver.rpc.shell import MAX_SHELLS

reactor = installed()

ALL = {"stdin": True, "stdout": True, "stderr": True}


def marker(base: int) -> str:
    """Return a number of seconds that no other test sleeps for."""
    return str(base + os.getpid() % 100000)


async def runs(seconds: str) -> None:
    """Wait until a sleep for that many seconds runs."""
    await until(lambda: living("sleep", seconds), f"sleep {seconds} runs")


async def is_killed(seconds: str) -> None:
    """Wait until it does not run any more."""
    await until(lambda: not living("sleep", seconds), f"sleep {seconds} is killed")


class ShellTests(SessionCase):
    """Tests without any containers."""

    async def shell(self, *command: str, **fields: Any) -> Any:
        start = messages.SessionStart(command=command, **(ALL | fields))
        return await self.begun(self.stub.Shell(timeout=60.0), messages.SessionInput(start=start))

    async def test_a_command_with_its_streams_and_exit_code(self) -> None:
        call = await self.shell("sh", "-c", "cat; echo err >&2; exit 7")
        await call.send(stdin(b"typed"))
        await call.done_sending()
        self.assertEqual(await self.all(call), (b"typed", b"err\n", 7))

    async def test_a_command_that_is_not_there(self) -> None:
        _, err, code = await self.all(await self.shell("/no/such/program"))
        self.assertEqual(code, 127)
        self.assertIn(b"/no/such/program", err)

    async def test_a_signal_is_an_exit_code_too(self) -> None:
        self.assertEqual((await self.all(await self.shell("sh", "-c", "kill -TERM $$")))[2], 143)

    async def test_without_a_command_it_is_the_login_shell(self) -> None:
        call = await self.shell()
        await call.send(stdin(b"echo $0 in $PWD as $USER with $HOME; exit 3\n"))
        out, _, code = await self.all(call)
        entry = pwd.getpwuid(os.geteuid())
        self.assertIn(f"in {entry.pw_dir} as {entry.pw_name} with {entry.pw_dir}".encode(), out)
        self.assertEqual(code, 3)

    async def test_a_terminal_with_its_name_its_size_and_its_keys(self) -> None:
        call = await self.shell(
            "sh", "-c", "read x; stty size; echo $TERM; tty; sleep 1000", tty=True, term="vt220"
        )
        await call.send(messages.SessionInput(resize=messages.TerminalSize(width=91, height=17)))
        await call.send(stdin(b"\n"))
        out, interrupted = b"", False
        async for message in call:
            out += message.stdout
            if b"/dev/pts/" in out and not interrupted:
                interrupted = True
                await call.send(stdin(b"\x03"))  # ^C
            if message.HasField("end"):
                self.assertEqual(message.end.exit_code, 130)
        self.assertIn(b"17 91\r\nvt220\r\n/dev/pts/", out)

    async def test_it_has_nothing_of_the_agents_environment(self) -> None:
        self.patch(os, "environ", os.environ | {"PLANTED": "in the agent"})
        out, _, _ = await self.all(await self.shell("env"))
        found = {line.partition("=")[0] for line in out.decode().splitlines()}
        self.assertEqual(
            found - {"PWD", "_", "SHLVL", "OLDPWD"}, {"PATH", "HOME", "USER", "LOGNAME", "SHELL"}
        )

    async def test_all_that_runs_in_it_ends_with_the_call(self) -> None:
        for tty in (False, True):
            first, orphan, ignoring = marker(1_100_000), marker(1_200_000), marker(1_300_000)
            script = (
                f"sleep {first} & (sleep {orphan} &) ; trap '' HUP; nohup sleep {ignoring} >/dev/null & "
                "echo ready; wait"
            )
            call = await self.shell("sh", "-c", script, tty=tty)
            output = aiter(call)
            out = b""
            while b"ready" not in out:
                out += (await anext(output)).stdout
            for each in (first, orphan, ignoring):
                await runs(each)
            call.cancel()
            for each in (first, orphan, ignoring):
                await is_killed(each)

    async def test_what_has_left_its_session_goes_on(self) -> None:
        seconds = marker(1_600_000)
        within = marker(1_700_000)
        call = await self.shell("sh", "-c", f"setsid --fork sleep {seconds}; sleep {within}")
        await runs(seconds)
        await runs(within)
        call.cancel()
        await is_killed(within)
        (pid,) = living("sleep", seconds)
        os.kill(pid, signal.SIGKILL)

    async def test_it_ends_with_the_nodes_connection(self) -> None:
        seconds = marker(1_400_000)
        await self.shell("sleep", seconds)
        await runs(seconds)
        for channel in self.agent.channels:
            await channel.close()
        await is_killed(seconds)

    async def test_what_is_not_read_waits(self) -> None:
        call = await self.shell("sh", "-c", "head -c 20000000 /dev/zero; echo done >&2")
        output = aiter(call)
        first = await anext(output)
        self.assertLessEqual(len(first.stdout), 256 * 1024)
        await deferLater(reactor, 0.5, lambda: None)
        self.assertTrue(living("head", "-c", "20000000"), "it waits for its reader")
        size = len(first.stdout)
        async for message in output:
            size += len(message.stdout)
        self.assertEqual(size, 20_000_000)

    async def test_no_more_than_the_limit_at_once_and_beside_the_sessions_of_containers(self) -> None:
        calls = [await self.shell("cat") for _ in range(MAX_SHELLS)]
        for call in calls:
            await call.send(stdin(b"x"))
            await anext(aiter(call))
        words = await self.failed(Code.RESOURCE_EXHAUSTED, await self.shell("true"))
        self.assertIn(f"{MAX_SHELLS} shells of the machine", words)
        await self.running()
        self.assertEqual((await self.all(await self.exec("true")))[2], 0)
        for call in calls:
            await call.done_sending()
            await self.all(call)
        self.assertEqual((await self.all(await self.shell("true")))[2], 0)

    async def test_wrong_input_is_refused_and_ends_it(self) -> None:
        await self.failed(Code.INVALID_ARGUMENT, await self.shell("true", term="a b"))
        await self.failed(Code.INVALID_ARGUMENT, await self.shell("true", term="x" * 65))
        await self.failed(Code.INVALID_ARGUMENT, await self.shell(""))
        await self.failed(Code.INVALID_ARGUMENT, await self.shell(*["x"] * 9000))
        seconds = marker(1_500_000)
        for wrong in (
            stdin(b"x" * (256 * 1024 + 1)),
            messages.SessionInput(resize=messages.TerminalSize(width=0, height=1)),
            messages.SessionInput(start=messages.SessionStart()),
        ):
            call = await self.shell("sleep", seconds)
            await call.send(wrong)
            await self.failed(Code.INVALID_ARGUMENT, call)
            await is_killed(seconds)


class AccountTests(SynchronousTestCase):
    """Which shell is run."""

    def account(self, home: str, program: str) -> shell.Account:
        entry = pwd.struct_passwd(("me", "x", 0, 0, "", home, program))
        self.patch(pwd, "getpwuid", lambda uid: entry)
        return shell.own_account()

    def test_that_of_the_account(self) -> None:
        self.assertEqual(self.account("/tmp", "/bin/bash"), shell.Account("me", "/tmp", "/bin/bash"))

    def test_one_that_can_be_used_where_the_account_has_none(self) -> None:
        for none in ("/usr/sbin/nologin", "/bin/false", "/no/such/shell", ""):
            self.assertEqual(self.account("/no/such/home", none), shell.Account("me", "/", shell.FALLBACK))


class SessionsEndTests(SynchronousTestCase):
    """`kill_session` with real processes."""

    def test_only_that_session(self) -> None:
        with subprocess.Popen(["sleep", "600"], start_new_session=True) as other:
            with subprocess.Popen(["sh", "-c", "sleep 600 & wait"], start_new_session=True) as leader:
                shell.kill_session(leader.pid)
                self.assertEqual(leader.wait(10), -signal.SIGKILL)
            self.assertIsNone(other.poll())
            other.kill()

    def test_never_that_of_init_of_the_kernel_or_of_the_agent_itself(self) -> None:
        killed: list[int] = []
        self.patch(os, "kill", lambda pid, signal: killed.append(pid))
        own = os.getsid(0)
        for leader in (0, 1, own):
            self.patch(os, "getsid", lambda pid, leader=leader: leader if pid else own)
            shell.kill_session(leader)
            self.assertEqual(killed, [], f"session {leader}")
        self.patch(os, "getsid", lambda pid: 2 if pid else own)
        shell.kill_session(2)
        self.assertIn(os.getpid(), killed, "it would have killed whatever it found")
