# SPDX-License-Identifier: Apache-2.0
"""Whole lifecycles of VMs, with the calls that a node makes."""

from __future__ import annotations

import time
from typing import Any

from twisted.internet.defer import Deferred, gatherResults

from infranetes.providers.interface import InstanceSpec, InstanceState
from infranetes_common.errors import DeadlineExceeded, Unavailable
from tests.contract.pod_provider_case import ProviderCase
from tests.support.clouds.simulated_machine import SETTINGS


class LifecycleCase(ProviderCase):
    """For tests whose `world` is a simulated cloud."""

    world: Any

    async def run_lifecycle(self, provider: Any, spec: InstanceSpec | None = None) -> None:
        """Launch a VM, wait for it, and destroy it, retrying as a node does."""
        spec = spec or self.spec()
        launched = await self.retried(lambda: provider.launch(spec))
        instance = await self.retried(lambda: provider.wait_running(launched.id, self.boot_timeout))
        self.assertEqual((instance.state, instance.token), (InstanceState.RUNNING, spec.token))
        self.assertEqual((await self.agent_info(instance)).sandbox_id, spec.sandbox_id)
        self.check_machine(spec)
        await self.retried(lambda: provider.destroy(instance.id))

    def check_machine(self, spec: InstanceSpec) -> None:
        """Check that a machine has taken its identity on, and that its clock never went back."""
        ids = (self.run_dir / "machines").rglob("machine-id")
        machines = {file.read_text().strip(): file.parent for file in ids}
        self.assertIn(spec.identity.machine_id, machines)
        etc = machines[spec.identity.machine_id]
        self.assertEqual((etc / "hostname").read_text().strip(), spec.identity.hostname)
        self.assertFalse((etc / SETTINGS).exists(), "its clock was right")

    async def retried(self, call: Any) -> Any:
        """Retry a failing call for as long as a circuit may stay open, which may be longer than a boot."""
        until = time.monotonic() + 240.0
        while True:
            try:
                return await self.within(call())
            except (Unavailable, DeadlineExceeded):
                if time.monotonic() > until:
                    raise
                await self.sleep(0.1)

    async def run_lifecycles(self, count: int) -> None:
        """Run several lifecycles concurrently, and check that nothing is left."""
        provider = await self.started()
        await gatherResults(
            [Deferred.fromCoroutine(self.run_lifecycle(provider)) for _ in range(count)], consumeErrors=True
        )
        self.assertEqual(await self.retried(provider.list), [])
        self.world.faults.clear()
        self.assertEqual(self.world.holdings(), [])
