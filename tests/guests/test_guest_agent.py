# SPDX-License-Identifier: Apache-2.0
"""Debian in a VM, reached by its qemu-ga over a virtio-serial port: what the node relies on in every way."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any, ClassVar

from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from infranetes.machines.agentless.access import IGuestAccess
from infranetes.machines.agentless.guest_agent.access import GuestAgentAccess
from infranetes_common.concurrency import start
from infranetes_common.reactors import installed
from tests.contract.guest_access import GuestAccessContract
from tests.guests import catalogue
from tests.guests.machine import Machine
from tests.harness.durations import slow
from tests.harness.needs import needs_guests, needs_qemu, nightly

BOOT_SECONDS = 900.0  # without KVM, on a machine that is busy with other work
AGAIN = "systemd-run --no-block --quiet sh -c 'sleep 1; systemctl restart qemu-guest-agent'"

reactor = installed()


def with_port(directory: Path) -> Machine:
    """Start Debian with a port for its agent, which is a socket in `directory`."""
    port = "virtserialport,chardev=agent,name=org.qemu.guest_agent.0"
    socket = f"socket,id=agent,path={directory}/agent,server=on,wait=off"
    more = ["-chardev", socket, "-device", "virtio-serial-pci", "-device", port]
    return Machine(catalogue.path("debian-agent.qcow2"), directory, more=more)


def access_to(directory: Path) -> GuestAgentAccess:
    """Return the access to its guest."""
    return GuestAgentAccess(reactor, UNIXClientEndpoint(reactor, str(directory / "agent")), "sandbox 1")


@nightly
@needs_qemu
@needs_guests("debian-agent.qcow2")
@slow(400, "it boots Debian, which is emulated where there is no KVM")
class GuestAgentInVmTests(GuestAccessContract, TestCase):
    """All tests have one VM, since its boot takes a minute."""

    terminals = live = False
    call_seconds = 300.0
    timeout = 1800.0
    directory_of_vm: ClassVar[Path]
    vm: ClassVar[Machine]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.directory_of_vm = Path(tempfile.mkdtemp(prefix="inf-"))
        cls.vm = with_port(cls.directory_of_vm)

    @classmethod
    def tearDownClass(cls) -> None:
        cls.vm.end()
        shutil.rmtree(cls.directory_of_vm)
        super().tearDownClass()

    async def make_access(self) -> IGuestAccess:
        access = access_to(self.directory_of_vm)
        await access.answers(BOOT_SECONDS)
        return access

    async def cut(self) -> None:
        await self.shell(AGAIN)
        await deferLater(reactor, 2.0, lambda: None)

    async def test_what_else_the_agent_does(self) -> None:
        access: Any = self.access
        self.assertEqual(await access.system(), "debian")
        self.assertIn("guest-exec", await access.commands())
        self.assertIn("lo", [card.name for card in await access.cards()])
        await access.add_ssh_key("root", "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAbc infranetes")
        self.assertIn(b"infranetes", (await self.shell("cat /root/.ssh/authorized_keys")).stdout)
        await access.set_time(1_800_000_000 * 10**9)
        self.assertLess(abs(int((await self.shell("date +%s")).stdout) - 1_800_000_000), 100)
        self.assertGreater(await access.freeze(), 0)
        await access.thaw()
        self.assertEqual((await self.shell("true")).exit_code, 0)


@nightly
@needs_qemu
@needs_guests("debian-agent.qcow2")
@slow(120, "it boots Debian, which is emulated where there is no KVM")
class PowerOffTests(TestCase):
    timeout = 1800.0

    async def test_the_guest_powers_off(self) -> None:
        directory = Path(tempfile.mkdtemp(prefix="inf-"))
        self.addCleanup(shutil.rmtree, directory)
        vm = with_port(directory)
        self.addCleanup(vm.end)
        access = access_to(directory)
        self.addCleanup(lambda: start(access.close()))
        await access.answers(BOOT_SECONDS)
        await access.power_off()
        await vm.until_off(300.0)
