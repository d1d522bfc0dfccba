# SPDX-License-Identifier: Apache-2.0
"""A new installation does not have a guest image: the daemon waits for it and says what to do."""

from __future__ import annotations

import json
import signal
import socket
import time
from pathlib import Path

from twisted.internet.endpoints import UNIXClientEndpoint

from infranetes.guest.image import GuestImage, write
from infranetes.providers.qemu.vm.consoles import ConsoleArchive
from infranetes.providers.qemu.vm.record import VmRecord
from infranetes_common.wire import control, cri
from infranetes_common.wire.control_rpcs import ControlStub
from infranetes_common.wire.cri_rpcs import RuntimeStub
from tests.harness.needs import needs_root
from tests.infranetes.daemon.case import DaemonCase, reactor
from txgrpc import Channel, Code, GrpcError

COMMAND = "`infranetes-guest build`"


def put_image(images: Path) -> None:
    """Put an image there that is complete and in use; its parts are empty files."""
    image = GuestImage(images / "one", "key", time.time(), "bookworm", "6.1.0", ())
    image.directory.mkdir(parents=True)
    for part in (image.disk, image.kernel, image.initrd):
        part.touch()
    write(image)
    (images / "current").symlink_to("one")


@needs_root
class FreshTests(DaemonCase):
    """QEMU without anything to boot."""

    def setUp(self) -> None:
        super().setUp()
        self.config["provider"] = "qemu"
        self.config["providers"] = {
            "qemu": {
                "image_dir": str(self.root / "guest"),
                "user": "nobody",
                "qemu": str(self.root / "no-such-qemu"),
            }
        }
        path = str(self.root / "notify")
        self.manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.addCleanup(self.manager.close)
        self.manager.bind(path)
        self.manager.setblocking(False)
        self.environment["NOTIFY_SOCKET"] = path

    async def told(self, words: str) -> str:
        """Wait for a notification to the service manager that has these words. Return it."""
        while True:
            try:
                said = self.manager.recv(4096).decode()
            except BlockingIOError:
                self.assertTrue(self.alive, self.log)
                await self.sleep(0.05)  # trial's timeout ends this
                continue
            if words in said:
                return said

    async def test_it_waits_and_goes_on_when_there_is_one(self) -> None:
        self.process = self.spawn()
        said = await self.told("guest image")
        # systemctl, and thus apt, does not wait for what only an administrator can do.
        self.assertIn("READY=1", said.splitlines())
        self.assertIn("STATUS=waiting", said)
        self.assertIn(COMMAND, said)
        self.channel = Channel(reactor, UNIXClientEndpoint(reactor, str(self.socket)))
        self.runtime = RuntimeStub(self.channel)
        status = await self.runtime.Status(cri.StatusRequest(), timeout=10.0)
        self.assertIn(COMMAND, json.dumps([each.message for each in status.status.conditions]))
        with self.assertRaises(GrpcError) as caught:
            await self.runtime.RunPodSandbox(cri.RunPodSandboxRequest(config=self.pod()), timeout=20.0)
        self.assertEqual(caught.exception.code, Code.UNAVAILABLE)
        self.assertIn(COMMAND, caught.exception.message)
        self.assertTrue(self.alive)
        self.assertNotIn("Traceback", self.log)
        put_image(self.root / "guest")
        # The start goes on to its next step, which fails here: this QEMU does not exist.
        await self.until(lambda: "no-such-qemu" in self.log, "the next step", 60.0)

    async def test_a_reload_leaves_what_it_waits_for_in_the_status(self) -> None:
        self.process = self.spawn()
        waiting = await self.told("guest image")
        self.process.send_signal(signal.SIGHUP)
        await self.told("RELOADING=1")
        self.assertEqual(await self.told("STATUS="), waiting)
        (self.root / "infranetes.toml").write_text("sockett = 1\n")
        self.process.send_signal(signal.SIGHUP)
        said = await self.told("the configuration was not reloaded")
        self.assertTrue(said.startswith(waiting), said)
        self.assertIn("sockett: not known", said)

    async def test_consoles_on_disk_are_shown_meanwhile(self) -> None:
        directory, vm = self.root / "state" / "qemu" / "consoles", self.root / "vm"
        vm.mkdir()
        (vm / "console.log").write_text("Kernel panic")
        record = VmRecord("ab" * 16, "cd" * 16, "c", "n", "10.7.0.2", 12.5)
        ConsoleArchive(directory, 3, 1000).add(record, vm)
        self.process = self.spawn()
        await self.told("guest image")
        path = str(self.root / "run" / "control.sock")
        self.channel = Channel(reactor, UNIXClientEndpoint(reactor, path))
        stub = ControlStub(self.channel)
        answer = await stub.GetConsole(control.GetConsoleRequest(sandbox="cdcd"), timeout=20.0)
        self.assertEqual((answer.vm_id, answer.text), (record.id, "Kernel panic"))
        with self.assertRaises(GrpcError) as caught:
            await stub.GetConsole(control.GetConsoleRequest(sandbox="eeee"), timeout=20.0)
        self.assertIn("guest image", caught.exception.message)
