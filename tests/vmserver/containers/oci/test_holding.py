# SPDX-License-Identifier: Apache-2.0
"""oci containers are held still, and adopted in clones, with real conmon, crun and freezers."""

from __future__ import annotations

import contextlib
import os
import signal

from twisted.trial.unittest import TestCase

from tests.contract.container_holding import AdoptContract, HoldContract
from tests.harness.needs import needs_crun
from tests.vmserver.containers.oci.provider_case import OciCase
from vmserver.containers.oci.bundle import CGROUPS
from vmserver.containers.oci.cgroup import Cgroup


@needs_crun
class OciHoldTests(OciCase, HoldContract, TestCase):
    """The pod that is kept."""


@needs_crun
class OciAdoptTests(OciCase, AdoptContract, TestCase):
    """A clone of it."""

    async def tearDown(self) -> None:
        for id in self.provider.kept():
            await self.provider.remove(id)
        await super().tearDown()

    async def die(self, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for container in (self.config.directory / "containers").iterdir():
            Cgroup(f"{CGROUPS}/{container.name}").thaw()  # with version 1 they die once they are let go
