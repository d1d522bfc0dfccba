# SPDX-License-Identifier: Apache-2.0
"""`infranetes-ctl enter` as a process, on terminals and pipes, against a daemon as a process.

Simulated VMs have real agents, whose shells are processes of this machine.
"""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from twisted.internet.threads import deferToThread

from infranetes.ctl.cli import DONE, DOWN, FAILED, INTERRUPTED
from tests.contract.container_sessions import living
from tests.harness.durations import slow
from tests.harness.needs import needs_mounts, needs_registry
from tests.infranetes.daemon.case import ROOT
from tests.infranetes.daemon.ctl import CtlCase
from tests.infranetes.daemon.terminal import OnTerminal
from tests.support import warm

TYPED = "typed-in-there-4711"
READ_AGAIN = "was read again: control.enter is in force"


@needs_registry
class EnterCase(CtlCase):
    """A daemon that allows `enter`, with one pod without containers."""

    allowed = True
    simulated: ClassVar[Mapping[str, str]] = {}
    pod_has: ClassVar[Mapping[str, str]] = {}

    async def setUp(self) -> None:
        super().setUp()
        if self.allowed:
            self.config["control"] = {"enter": True}
        self.config["providers"]["simulated"] |= self.simulated
        await self.start()
        self.sandbox = await self.run_pod("web", **self.pod_has)

    def words(self, *words: str) -> list[str]:
        """Return the arguments of Python that enter the pod."""
        config = str(self.root / "infranetes.toml")
        return ["-m", "infranetes.ctl.cli", "--config", config, "enter", *words]

    @property
    def surroundings(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "vt220"}

    def run_by_pipes(self, *words: str, typed: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            warm.command(*self.words(*words)),
            input=typed,
            capture_output=True,
            cwd=ROOT,
            env=self.surroundings,
            timeout=100,
        )

    async def entered(self, *words: str, typed: bytes = b"") -> tuple[bytes, bytes, int]:
        """Run the command with pipes. Return its output, its standard error and its exit code."""
        done = await deferToThread(self.run_by_pipes, *words, typed=typed)
        self.assertNotIn(b"Traceback", done.stderr)
        return done.stdout, done.stderr, done.returncode

    async def on_terminal(self, *words: str) -> OnTerminal:
        """Run the command on a terminal. Return it once it has entered the VM."""
        on = OnTerminal([sys.executable, *self.words(*words)], ROOT, self.surroundings)
        self.addCleanup(on.close)
        await on.shows(b"^] three times within a second leaves it")
        return on

    def marker(self, base: int) -> str:
        """Return a number of seconds that no other test sleeps for."""
        return str(base + os.getpid() % 100000)

    async def sleeping(self, base: int) -> tuple[OnTerminal, str]:
        """Enter a VM and run sleep in it. Return the terminal and the marker of the sleep."""
        seconds = self.marker(base)
        on = await self.on_terminal("web", "--", "sh", "-c", f"sleep {seconds} & echo begun; cat")
        await on.shows(b"begun")
        await self.until(lambda: living("sleep", seconds), "it sleeps")
        self.assertTrue(on.is_raw)
        return on, seconds

    async def gone(self, seconds: str) -> None:
        await self.until(lambda: not living("sleep", seconds), "what ran in the shell is killed")


class RefusedTests(EnterCase):
    allowed = False

    async def reload(self) -> None:
        assert self.process is not None
        before = self.log.count(READ_AGAIN)
        self.process.send_signal(signal.SIGHUP)
        await self.until(lambda: self.log.count(READ_AGAIN) > before, "it is read again")

    async def test_nobody_may_until_the_configuration_says_so(self) -> None:
        out, err, code = await self.entered("web", "--", "echo", TYPED)
        self.assertEqual((out, code), (b"", FAILED))
        self.assertIn(b"set control.enter = true", err)
        self.assertIn("a shell in a pod's VM was refused", self.log)
        self.assertIn(f"uid={os.getuid()}", self.log)
        for allowed, expected in ((True, DONE), (False, FAILED)):
            self.config["control"] = {"enter": allowed}
            (self.root / "infranetes.toml").write_text(self.written())
            await self.reload()
            self.assertEqual((await self.entered("web", "--", "echo", TYPED))[2], expected)


class PipeTests(EnterCase):
    async def test_a_commands_streams_arguments_and_exit_code(self) -> None:
        script = 'cat; echo "$#:$*" >&2; exit 7'
        data = os.urandom(3_000_000)
        out, err, code = await self.entered("web", "--", "sh", "-c", script, "x", "--", "a b", typed=data)
        self.assertEqual((err, code), (b"2:-- a b\n", 7))
        self.assertEqual(out, data)

    async def test_a_script_for_the_login_shell(self) -> None:
        out, err, code = await self.entered("default/web", typed=b"echo $HOME; exit 4\n")
        self.assertEqual((out.decode().strip(), code), (pwd.getpwuid(os.geteuid()).pw_dir, 4), err)

    async def test_what_reads_no_more_ends_it(self) -> None:
        seconds = self.marker(2_100_000)
        script = f"sleep {seconds} & yes"
        with subprocess.Popen(
            warm.command(*self.words("web", "--", "sh", "-c", script)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=self.surroundings,
        ) as entering:
            assert entering.stdout is not None
            self.assertEqual(await deferToThread(entering.stdout.readline), b"y\n")
            entering.stdout.close()
            self.assertEqual(await deferToThread(entering.wait, 40), DONE)
        await self.gone(seconds)

    async def test_a_pod_that_is_not_there_not_ready_or_gone(self) -> None:
        self.assertIn(b"nothing is known of a pod 'none'", (await self.entered("none", "--", "true"))[1])
        await self.stop_pod(self.sandbox)
        self.assertIn(b"is not ready: it is stopped", (await self.entered("web", "--", "true"))[1])
        await self.remove_pod(self.sandbox)
        _, err, code = await self.entered("web", "--", "true")
        self.assertIn(b"is gone, and its VM with it", err)
        self.assertEqual(code, FAILED)


class TerminalTests(EnterCase):
    async def test_a_shell_on_a_terminal(self) -> None:
        on = await self.on_terminal("web")
        (vm,) = await self.vms()
        self.assertIn(f"VM {vm['id']} of pod default/web".encode(), on.shown)
        self.assertTrue(on.is_raw)
        on.type(b"PS1=; stty size; echo $TERM\r")
        await on.shows(b"24 80\r\nvt220\r\n")
        on.resize(132, 43)
        await self.sleep(0.5)
        on.type(b"stty size\r")
        await on.shows(b"43 132")
        on.type(f"sleep 1000; echo {TYPED}\r".encode())
        await self.sleep(0.5)
        on.type(b"\x03")  # ^C is for the shell, not for infranetes-ctl
        on.type(b"exit 5\r")
        self.assertEqual(await on.ended(), 5)
        self.assertTrue(on.is_as_before)
        await self.until(lambda: "the shell in VM" in self.log, "its end is written down")
        begin, end = (line for line in self.log.splitlines() if "shell" in line and "default/web" in line)
        for line in (begin, end):
            self.assertIn(f"sandbox={self.sandbox}", line)
            self.assertIn(f"uid={os.getuid()} pid={on.process.pid}", line)
            self.assertIn(vm["id"], line)
        self.assertIn("exit code 5", end)
        self.assertIn("exit_code=5", end)
        self.assertNotIn(TYPED, self.log)

    async def test_a_person_leaves_a_shell_that_does_not_answer(self) -> None:
        on, seconds = await self.sleeping(2_200_000)
        on.type(b"\x1d\x1d\x1d")
        self.assertEqual(await on.ended(), INTERRUPTED)
        self.assertTrue(on.is_as_before)
        await self.gone(seconds)
        await self.until(lambda: "the caller went away" in self.log, "its end is written down")

    async def test_sigterm_leaves_the_terminal_as_it_was(self) -> None:
        await self.ended_by(signal.SIGTERM, 2_300_000)

    async def test_sighup_leaves_the_terminal_as_it_was(self) -> None:
        await self.ended_by(signal.SIGHUP, 2_400_000)

    async def ended_by(self, number: signal.Signals, base: int) -> None:
        on, seconds = await self.sleeping(base)
        on.process.send_signal(number)
        self.assertEqual(await on.ended(), INTERRUPTED)
        self.assertTrue(on.is_as_before)
        await self.gone(seconds)

    async def test_a_client_that_is_killed_ends_it(self) -> None:
        on, seconds = await self.sleeping(2_600_000)
        on.process.send_signal(signal.SIGKILL)
        await self.gone(seconds)
        await self.until(lambda: "the caller went away" in self.log, "its end is written down")


class EndTests(EnterCase):
    """What ends a shell that the user did not exit."""

    async def test_the_daemon_is_killed(self) -> None:
        on, seconds = await self.sleeping(2_700_000)
        await self.kill()
        self.assertEqual(await on.ended(), DOWN)
        self.assertIn(b"no infranetes daemon answers", on.shown)
        self.assertTrue(on.is_as_before)
        await self.gone(seconds)
        await self.start()
        self.assertEqual((await self.entered("web", "--", "true"))[2], DONE)

    async def test_the_daemon_stops_and_does_not_wait_for_it(self) -> None:
        self.config["times"] = {"shutdown": 1000.0}
        await self.restart()
        on, seconds = await self.sleeping(2_800_000)
        assert self.process is not None
        self.process.terminate()
        self.assertEqual(await on.ended(), FAILED)
        self.assertIn(b"the daemon is stopping", on.shown)
        self.assertTrue(on.is_as_before)
        await self.ended()
        await self.gone(seconds)

    async def test_the_agent_is_gone(self) -> None:
        on, seconds = await self.sleeping(2_900_000)
        (vm,) = await self.vms()
        await self.farm("behave", id=vm["id"], behaviour="no-agent", after=0)
        self.assertEqual(await on.ended(), FAILED)
        self.assertIn(f"the agent of sandbox {self.sandbox} can't be reached".encode(), on.shown)
        self.assertTrue(on.is_as_before)
        await self.gone(seconds)

    async def test_the_pod_is_stopped(self) -> None:
        on, seconds = await self.sleeping(3_000_000)
        await self.stop_pod(self.sandbox)
        self.assertEqual(await on.ended(), FAILED)
        self.assertTrue(on.is_as_before)
        await self.gone(seconds)


@needs_mounts
@slow(6, "a machine boots, whose agent is then killed")
class OwnMachineTests(EnterCase):
    """A VM like those of clouds: its agent is a process in it, with the VM's own users and processes."""

    timeout = 300
    patience = 3.0

    pod_has: ClassVar[Mapping[str, str]] = {"hostname": "web-0"}
    simulated: ClassVar[Mapping[str, str]] = {
        "machines": "namespaces",
        "cgroup": f"infranetes-tests-enter-{os.getpid()}",
        "pod_cidr": f"198.18.{os.getpid() % 256}.0/24",
    }

    async def test_it_is_in_the_vm_and_told_of_the_end_of_its_agent(self) -> None:
        self.assertEqual((await self.entered("web", "--", "hostname"))[::2], (b"web-0\n", DONE))
        piped = self.marker(3_200_000)
        by_pipes = deferToThread(self.run_by_pipes, "web", "--", "sh", "-c", f"exec sleep {piped}")
        await self.until(lambda: living("sleep", piped), "it runs")
        on, seconds = await self.sleeping(3_100_000)
        (sleep,) = living("sleep", seconds)
        agent = parent(parent(sleep))
        self.assertIn(b"vmserver", Path(f"/proc/{agent}/cmdline").read_bytes())
        os.kill(agent, signal.SIGKILL)
        self.assertEqual(await on.ended(), FAILED)
        self.assertIn(f"the agent of sandbox {self.sandbox} can't be reached".encode(), on.shown)
        self.assertTrue(on.is_as_before)
        self.assertEqual((await by_pipes).returncode, FAILED)
        for each in (seconds, piped):
            await self.gone(each)


def parent(pid: int) -> int:
    """Return a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
