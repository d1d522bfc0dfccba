"""Whole lives of VMs, as the node makes its calls."""

from __future__ import annotations

import time
from typing import Any

from twisted.internet.defer import Deferred, gatherResults

from infranetes.providers.interface import InstanceSpec, InstanceState
from infranetes_common.errors import Unavailable
from tests.contract.pod_provider_case import ProviderCase


class Lives(ProviderCase):
    """For cases whose `world` is a simulated cloud."""

    world: Any

    async def life(self, provider: Any, spec: InstanceSpec | None = None) -> None:
        """A VM from its launch to its end, as the node makes its calls: again when that is worth it."""
        spec = spec or self.spec()
        launched = await self.again(lambda: provider.launch(spec))
        instance = await self.again(lambda: provider.wait_running(launched.id, self.boot_timeout))
        self.assertEqual((instance.state, instance.token), (InstanceState.RUNNING, spec.token))
        self.assertEqual((await self.agent_info(instance)).sandbox_id, spec.sandbox_id)
        await self.again(lambda: provider.destroy(instance.id))

    async def again(self, call: Any) -> Any:
        """Until it does not fail with `Unavailable`, as long as a circuit that opened may stay so."""
        until = time.monotonic() + 60.0
        while True:
            try:
                return await self.within(call())
            except Unavailable:
                if time.monotonic() > until:
                    raise
                await self.sleep(0.1)

    async def lives(self, count: int) -> None:
        """Some VMs, side by side, after which there is nothing."""
        provider = await self.started()
        await gatherResults(
            [Deferred.fromCoroutine(self.life(provider)) for _ in range(count)], consumeErrors=True
        )
        self.assertEqual(await self.again(provider.list), [])
        self.world.faults.clear()
        self.assertEqual(self.world.holdings(), [])
