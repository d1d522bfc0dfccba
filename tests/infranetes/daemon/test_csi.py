# SPDX-License-Identifier: Apache-2.0
"""The CSI driver of a running daemon, and what it can do in the unit's sandbox."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from twisted.internet.endpoints import UNIXClientEndpoint
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from infranetes_common.wire import csi, pluginregistration
from infranetes_common.wire.csi_rpcs import ControllerStub, IdentityStub
from infranetes_common.wire.pluginregistration_rpcs import RegistrationStub
from tests.harness.needs import needs_root, needs_systemd
from tests.infranetes.daemon.case import ROOT, DaemonCase, reactor
from tests.infranetes.daemon.unit import UnitProgram
from tests.support.waiting import listens
from txgrpc import Channel

# Publishes a volume at a path, or ends that; binds a file at the place of another, as that of a raw volume.
_PUBLISHES = """
import os, sys
from infranetes.volumes.mount_table import MountTable
from infranetes.volumes.published import PublishedVolume, publish, unpublish
from infranetes.volumes.tmpfs import bind, unmount
from infranetes_common.errors import InfranetesError

what, target = sys.argv[1:]
try:
    if what == "publish":
        publish(target, PublishedVolume("data"), MountTable())
        one, other = (os.open(target + name, os.O_RDWR | os.O_CREAT) for name in (".one", ".other"))
        bind(one, other)
        unmount(os.fsencode(target + ".other"))
    else:
        unpublish(target, MountTable())
    print("done")
except InfranetesError as error:
    print(error)
"""


@needs_root
class DriverTests(DaemonCase):
    """With QEMU, whose volumes can be made before any VM can boot."""

    timeout = 300

    def setUp(self) -> None:
        super().setUp()
        self.config["provider"] = "qemu"
        self.config["providers"] = {"qemu": {"image_dir": str(self.root / "guest"), "user": "nobody"}}
        self.config["csi"] = {"kubelet_dir": str(self.root / "kubelet")}

    async def test_kubelet_finds_it_by_its_registration_and_a_volume_is_made(self) -> None:
        self.process = self.spawn()
        registration = self.root / "kubelet" / "plugins_registry" / "infranetes.io-reg.sock"
        await self.until(lambda: listens(registration), "the driver can be registered", 200.0)
        registering = Channel(reactor, UNIXClientEndpoint(reactor, str(registration)))
        self.addCleanup(registering.close)
        stub = RegistrationStub(registering)
        endpoint = (await stub.GetInfo(pluginregistration.InfoRequest(), timeout=60)).endpoint
        self.channel = Channel(reactor, UNIXClientEndpoint(reactor, endpoint))
        ready = (await IdentityStub(self.channel).Probe(csi.ProbeRequest(), timeout=60)).ready
        self.assertFalse(ready.value)  # no VM can attach it
        capability = csi.VolumeCapability(mount=csi.VolumeCapability.MountVolume())
        capability.access_mode.mode = csi.VolumeCapability.AccessMode.SINGLE_NODE_WRITER
        request = csi.CreateVolumeRequest(name="data", volume_capabilities=[capability])
        request.capacity_range.required_bytes = 1 << 20
        made = await ControllerStub(self.channel).CreateVolume(request, timeout=60)
        self.assertEqual(made.volume.volume_id, "data")
        self.assertEqual(os.listdir(self.root / "state" / "qemu" / "volumes"), ["data.raw"])

    async def test_a_provider_without_volumes_is_named(self) -> None:
        self.config["provider"] = "simulated"
        self.config["providers"] = {}
        self.process = self.spawn()
        self.assertNotEqual(await self.ended(200.0), 0)
        self.assertIn("csi.kubelet_dir: provider simulated has no volumes", self.log)


@needs_systemd
class UnitTests(TestCase):
    timeout = 300

    async def test_the_unit_publishes_volumes_for_others_to_see_with_its_drop_in_alone(self) -> None:
        program = UnitProgram(_PUBLISHES)
        self.addCleanup(program.remove)
        target = str(program.directory / "target")

        def published() -> bool:
            return "infranetes:data" in program.run("cat", "/proc/self/mountinfo")

        def told(what: str) -> str:
            program.start(f"{what} {target}")
            return program.finished()

        self.assertIn("systemd-csi.conf", await deferToThread(told, "publish"))
        self.assertFalse(await deferToThread(published))
        await deferToThread(program.add, ROOT / "docs" / "systemd-csi.conf")
        self.assertEqual(await deferToThread(told, "publish"), "done\n")
        self.assertTrue(await deferToThread(published))
        self.assertEqual(stat.S_IMODE(Path(target).stat().st_mode), 0o750)
        self.assertEqual(await deferToThread(told, "unpublish"), "done\n")
        self.assertFalse(await deferToThread(published))
        self.assertFalse(Path(target).exists())
