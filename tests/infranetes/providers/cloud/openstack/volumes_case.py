# SPDX-License-Identifier: Apache-2.0
"""Base class for tests of volumes on a simulated OpenStack."""

from __future__ import annotations

from typing import Any

from infranetes.providers.cloud.openstack.driver import Driver
from infranetes.providers.cloud.volumes.disks import VOLUME
from tests.infranetes.providers.cloud.case import OpenStackCase
from tests.infranetes.providers.cloud.volumes_case import CloudVolumesCase
from tests.support.clouds import cinder_schemas
from tests.support.clouds.cinder import Cinder

GIB = 1 << 30


class OpenStackVolumesCase(OpenStackCase, CloudVolumesCase[Driver]):
    """Volumes at Cinder.

    :cvar volume_seconds: how long a volume has a status in which something happens to it.
    :cvar lag_seconds: how long Cinder is slow to show a new one."""

    volume_seconds = 0.02
    lag_seconds = 0.0

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cinder_schemas.load()

    def setUp(self) -> object:
        result = super().setUp()
        self.world.volume_seconds, self.world.lag_seconds = self.volume_seconds, self.lag_seconds
        return result

    @property
    def cinder(self) -> Cinder:
        return self.world.api.cinder

    def disks(self) -> dict[str, Any]:
        """Return the volumes that are ours, by their ids."""
        return {id: one for id, one in self.cinder.volumes.items() if VOLUME in one["metadata"]}

    def has(self, machine: str, volume: str) -> bool:
        return machine in self.cinder.holders(volume)

    def asked(self, action: str) -> list[dict[str, str]]:
        return [one for one in self.world.requests if one["Action"] == action]

    def leftovers(self) -> list[str]:
        """Return what VMs have left. Volumes outlive them, but are attached to no VM that is gone."""
        for attachment in list(self.cinder.attachments.values()):
            self.assertIn(attachment["instance"], self.going(), attachment)
        self.cinder.volumes.clear()
        self.cinder.snapshots.clear()
        return super().leftovers()

    def going(self) -> list[str]:
        """Return the ids of the VMs that still are to give up their volumes."""
        return [one["instance"] for one in self.cinder.attachments.values()]
