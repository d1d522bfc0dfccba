# SPDX-License-Identifier: Apache-2.0
"""What the hypervisor adds to a running machine is used, though no udevd runs."""

from __future__ import annotations

import socket
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes_common.reactors import installed
from tests.harness.needs import ROOT_USER, needs
from tests.support.waiting import until
from vmserver.machine.hotplug import Hotplug, attach_filter, open_socket

reactor = installed()

CPU = b"add@/devices/system/cpu/cpu1\0ACTION=add\0DEVPATH=/devices/system/cpu/cpu1\0SUBSYSTEM=cpu\0SEQNUM=7\0"
_BLOCK = (
    b"change@/devices/pci0000:00/virtio1/block/%s\0ACTION=change\0SUBSYSTEM=block\0RESIZE=1\0DEVNAME=%s\0"
)
ROOT_GREW, OTHER_GREW = _BLOCK % (b"vda", b"vda"), _BLOCK % (b"sda", b"sda")
PLUGGED = b"add@/devices/pci0000:00/virtio2/host0/target0:0:1/0:0:1:0/block/sda\0ACTION=add\0DEVNAME=sda\0"


class FilterTests(SynchronousTestCase):
    def test_what_a_disk_makes_does_not_even_wake_the_agent(self) -> None:
        sends, receives = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.addCleanup(sends.close)
        self.addCleanup(receives.close)
        attach_filter(receives)
        others = (PLUGGED, b"remove@/devices/system/cpu/cpu1\0", b"bind@/devices/system\0", b"add@", b"a")
        for datagram in (*others, CPU, *others, ROOT_GREW, *others):
            sends.send(datagram)
        receives.setblocking(False)
        self.assertEqual([receives.recv(9999) for _ in range(2)], [CPU, ROOT_GREW])
        self.assertRaises(BlockingIOError, receives.recv, 9999)


class _Events:
    """A socket on which the kernel, or somebody else, has sent these."""

    def __init__(self, *datagrams: bytes, sender: int = 0) -> None:
        self.left = list(datagrams)
        self.sender = sender
        self.closed = False
        self._file = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def fileno(self) -> int:
        return self._file.fileno()

    def recvfrom(self, size: int) -> tuple[bytes, tuple[int, int]]:
        if not self.left:
            raise BlockingIOError
        return self.left.pop(0), (self.sender, 1)

    def close(self) -> None:
        self.closed = True
        self._file.close()


class HotplugTests(TestCase):
    def setUp(self) -> None:
        self.sys = Path(self.mktemp()).absolute()
        self.cpu = self.sys / "devices/system/cpu/cpu1"
        self.cpu.mkdir(parents=True)
        (self.cpu / "online").write_text("0\n")
        self.grown = self.sys / "grown"

    def hears(self, *datagrams: bytes, sender: int = 0) -> None:
        events = _Events(*datagrams, sender=sender)
        grow = ("/bin/sh", "-c", 'echo grown >>"$0"', str(self.grown))
        hotplug = Hotplug(reactor, lambda: events, self.sys, grow)  # type: ignore[arg-type, return-value]
        hotplug.begin()
        hotplug.begin()
        hotplug.doRead()
        hotplug.stop()
        hotplug.stop()
        self.assertTrue(events.closed)
        self.assertEqual((events.left, hotplug.fileno()), ([], -1))

    async def test_a_processor_is_put_online(self) -> None:
        self.hears(b"libudev\0nonsense", CPU)
        await until(lambda: (self.cpu / "online").read_text() == "1", "the processor is online")

    async def test_the_root_grows_with_its_disk_and_other_disks_are_left_alone(self) -> None:
        self.hears(PLUGGED, OTHER_GREW, ROOT_GREW)
        await until(self.grown.exists, "the root has grown")
        self.assertEqual(self.grown.read_text(), "grown\n")

    async def test_a_process_can_send_no_events(self) -> None:
        self.hears(CPU, ROOT_GREW, sender=1234)
        self.hears(ROOT_GREW)
        await until(self.grown.exists, "the root has grown")
        self.assertEqual((self.cpu / "online").read_text(), "0\n")

    async def test_a_processor_that_is_gone_again_harms_nothing(self) -> None:
        self.hears(CPU.replace(b"cpu1", b"cpu9"), ROOT_GREW)
        await until(self.grown.exists, "the root has grown")

    async def test_a_kernel_that_reports_nothing_is_logged_and_the_agent_goes_on(self) -> None:
        def refuses() -> socket.socket:
            raise OSError(1, "no")

        hotplug = Hotplug(reactor, refuses)
        hotplug.begin()
        hotplug.stop()

    @needs(ROOT_USER)
    async def test_the_kernels_own_events_arrive(self) -> None:
        with open_socket() as events:
            Path("/sys/class/mem/null/uevent").write_text("change")
            found: list[bytes] = []
            await until(lambda: _received(events, found), "an event")
        self.assertIn(b"change@/devices/virtual/mem/null", found[0])


def _received(events: socket.socket, found: list[bytes]) -> bool:
    try:
        found.append(events.recv(9999))
    except BlockingIOError:
        return False
    return True
