# SPDX-License-Identifier: Apache-2.0
"""Debian's qemu-ga on this machine, which takes the place of a guest."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.trial.unittest import TestCase

from infranetes.machines.agentless.access import IGuestAccess
from infranetes.machines.agentless.guest_agent.access import GuestAgentAccess
from infranetes.machines.agentless.guest_agent.commands import MAX_STDIN
from infranetes_common.concurrency import Coro, sleep, start
from infranetes_common.errors import NotOffered, Unavailable
from infranetes_common.reactors import installed
from infranetes_common.wire import vmserver
from tests.contract.guest_access import GuestAccessContract
from tests.harness.needs import find_program, needs_programs
from tests.infranetes.machines.agentless.guest_agent.serial_port import SerialPort

reactor = installed()
# What would change this machine.
NEVER = (
    "guest-shutdown",
    "guest-set-time",
    "guest-set-user-password",
    "guest-set-vcpus",
    "guest-set-memory-blocks",
    "guest-suspend-disk",
    "guest-suspend-ram",
    "guest-suspend-hybrid",
    "guest-fsfreeze-freeze",
    "guest-fsfreeze-freeze-list",
    "guest-fstrim",
    "guest-ssh-add-authorized-keys",
    "guest-ssh-remove-authorized-keys",
)


class RealAgentCase:
    """A qemu-ga, and the access to it."""

    addCleanup: Any  # of TestCase

    def make_directory(self) -> None:
        self.directory_of_agent = Path(tempfile.mkdtemp(prefix="inf-"))
        self.addCleanup(shutil.rmtree, self.directory_of_agent)
        self.socket = self.directory_of_agent / "agent"
        self.agent: subprocess.Popen[bytes] | None = None
        self.addCleanup(self.end_agent)

    def new_access(self) -> GuestAgentAccess:
        access = GuestAgentAccess(reactor, UNIXClientEndpoint(reactor, str(self.socket)), "sandbox 1")
        self.addCleanup(lambda: start(access.close()))
        return access

    def start_agent(self, *never: str, terminal: str = "") -> None:
        program = find_program("qemu-ga")
        assert program is not None
        port = ["-m", "isa-serial", "-p", terminal]
        if not terminal:
            self.socket.unlink(missing_ok=True)  # of one that was killed
            port = ["-m", "unix-listen", "-p", str(self.socket)]
        words = [*port, "-t", str(self.directory_of_agent)]
        self.agent = subprocess.Popen(
            [program, *words, "-b", ",".join((*NEVER, *never))],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
        )

    def end_agent(self) -> None:
        if self.agent is not None:
            self.agent.kill()
            self.agent.wait()
            self.agent = None


@needs_programs("qemu-ga")
class RealAgentContractTests(RealAgentCase, GuestAccessContract, TestCase):
    """What the node relies on in every access."""

    terminals = live = False

    async def make_access(self) -> IGuestAccess:
        self.make_directory()
        self.start_agent()
        access = self.new_access()
        await access.answers(10)
        return access

    async def cut(self) -> None:
        self.end_agent()
        self.start_agent()


@needs_programs("qemu-ga")
class RealAgentTests(RealAgentCase, TestCase):
    """What is this agent's own."""

    def setUp(self) -> None:
        self.make_directory()
        self.access = self.new_access()

    def run_(
        self, *command: str, seconds: int = 20, max_output: int = 1 << 20, stdin: bytes = b""
    ) -> Coro[vmserver.ExecSyncResponse]:
        return self.access.run(command, seconds, 0.0, max_output, stdin)

    async def test_what_it_may_do_and_sees_is_told(self) -> None:
        self.start_agent()
        await self.access.answers(10)
        self.assertIn("guest-exec", await self.access.commands())
        self.assertNotIn("guest-shutdown", await self.access.commands())
        self.assertIn("lo", [card.name for card in await self.access.cards()])
        self.assertTrue(await self.access.system())

    async def test_as_much_input_as_may_be(self) -> None:
        self.start_agent()
        await self.access.answers(10)
        result = await self.run_("wc", "-c", stdin=b"x" * MAX_STDIN)
        self.assertEqual(result.stdout, b"%d\n" % MAX_STDIN)

    async def test_more_output_than_the_agent_keeps_is_sixteen_mib_and_a_note(self) -> None:
        self.start_agent()
        await self.access.answers(10)
        result = await self.run_("head", "-c", "17000000", "/dev/zero", seconds=60, max_output=16 << 20)
        self.assertEqual(result.stdout, bytes(16 << 20))
        self.assertIn(b"16 MiB", result.stderr)

    async def test_an_agent_that_is_started_again_is_found_again(self) -> None:
        await self.assertFailure(start(self.access.answers(0.2)), Unavailable)
        reached = start(self.access.answers(20))
        self.start_agent()
        await reached
        self.end_agent()
        self.start_agent()
        await self.access.answers(20)
        self.assertEqual((await self.run_("echo", "again")).stdout, b"again\n")

    async def test_another_client_before_leaves_nothing_behind(self) -> None:
        """A daemon that was killed had asked something whose answer comes later."""
        port = SerialPort(reactor, self.socket)
        self.addCleanup(port.close)
        self.addCleanup(self.end_agent)
        self.start_agent(terminal=port.path)
        for _ in range(40):  # it forgets what it is sent before it is ready
            with contextlib.suppress(Unavailable):
                await self.access.answers(0.5)
                break
        await self.access.close()
        for _ in range(3):
            other = self.new_access()
            asked = start(other.run(["head", "-c", "3000000", "/dev/zero"], 10, 0.0, 1 << 20))
            await sleep(reactor, 0.1)
            await other.close()
            with contextlib.suppress(Unavailable):
                await asked
            again = self.new_access()
            await again.answers(20)
            self.assertEqual((await again.run(["echo", "mine"], 10, 0.0, 100)).stdout, b"mine\n")
            await again.close()

    async def test_an_agent_that_may_not_execute_says_so(self) -> None:
        self.start_agent("guest-exec", "guest-exec-status")
        await self.access.answers(10)
        failure = await self.assertFailure(start(self.run_("true")), NotOffered)
        self.assertIn("guest-exec", str(failure))
        self.assertNotIn("guest-exec", await self.access.commands())
        await self.assertFailure(start(self.access.usage()), NotOffered)
