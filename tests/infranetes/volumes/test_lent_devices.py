# SPDX-License-Identifier: Apache-2.0
"""Which of a container's mounts become devices that the provider lends."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from twisted.internet.defer import Deferred, succeed
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import alsoProvides

from infranetes.providers.volumes import IHasVolumes, ILendsDevices
from infranetes.volumes.lent_devices import LentDevices
from infranetes.volumes.published import PublishedVolume
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition
from infranetes_common.wire import cri

DISK, LINK = "/dev/vdb", "/dev/disk/by-id/data"


class LentDevicesTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.asked: list[str] = []
        self.lent = LentDevices(self.find)

    async def find(self, paths: Sequence[str]) -> list[str]:
        self.asked += paths
        return [DISK if path in (DISK, LINK) else "" for path in paths]

    def provider(self, lends: bool | None) -> Any:
        """Return a provider. :param lends: whether it lends devices now; None: it never does."""

        def lend(path: str) -> Deferred[str]:
            return succeed(f"lent-{path}")

        provider = SimpleNamespace(name="qemu", volumes=SimpleNamespace(lends=lends, lend=lend))
        alsoProvides(provider, IHasVolumes)
        if lends is not None:
            alsoProvides(provider.volumes, ILendsDevices)
        return provider

    def config(self) -> cri.ContainerConfig:
        return cri.ContainerConfig(
            command=["run"],
            mounts=[
                cri.Mount(host_path="/srv", container_path="/data"),
                cri.Mount(host_path=LINK, container_path="/dev/a", readonly=True),
                cri.Mount(host_path=DISK, container_path="/dev/b"),
                cri.Mount(image=cri.ImageSpec(image="i"), container_path="/image"),
            ],
            devices=[cri.Device(host_path="/dev/fuse", container_path="/dev/fuse", permissions="rw")],
        )

    def changed(self, config: cri.ContainerConfig, lends: bool | None = True) -> cri.ContainerConfig:
        return self.successResultOf(start(self.lent.with_devices(config, self.provider(lends))))

    def test_mounts_of_block_devices_become_devices_and_all_else_stays(self) -> None:
        given = self.config()
        changed = self.changed(given)
        self.assertEqual(given, self.config(), "what was asked for is not changed itself")
        self.assertEqual([mount.container_path for mount in changed.mounts], ["/data", "/image"])
        devices = [(one.host_path, one.container_path, one.permissions) for one in changed.devices]
        self.assertEqual(
            devices,
            [("/dev/fuse", "/dev/fuse", "rw"), (DISK, "/dev/a", "r"), (DISK, "/dev/b", "rwm")],
        )
        self.assertEqual(list(changed.command), ["run"])
        self.assertEqual(self.asked, ["/srv", LINK, DISK], "only paths are looked at")

    def test_where_none_is_lent_nothing_is_looked_at(self) -> None:
        for lends in (False, None):
            self.assertEqual(self.changed(self.config(), lends), self.config())
        self.assertEqual(self.changed(cri.ContainerConfig()), cri.ContainerConfig())
        self.assertEqual(self.asked, [])

    def test_a_block_device_is_a_volume_that_the_provider_lends_or_is_refused(self) -> None:
        def at(path: str, lends: bool | None = True) -> Deferred[PublishedVolume | None]:
            return start(self.lent.volume_at(path, self.provider(lends)))

        self.assertEqual(self.successResultOf(at(LINK)), PublishedVolume(f"lent-{DISK}", ""))
        self.assertIsNone(self.successResultOf(at("/dev/fuse")))
        self.assertIsNone(self.successResultOf(at("/dev/fuse", None)))
        self.failureResultOf(at(LINK, None), FailedPrecondition)
