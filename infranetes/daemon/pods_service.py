# SPDX-License-Identifier: Apache-2.0
"""The sandboxes, their VMs and the pool over the daemon's life."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

from twisted.application.service import Service
from twisted.internet.defer import Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.daemon.handlers import pools_with
from infranetes.daemon.node import Node
from infranetes.pods.node.node_providers import NodeProvider
from infranetes.pods.store.records import POD_CIDR, Contents
from infranetes.pods.store.states import SHOWN_SANDBOXES
from infranetes.providers.absent import AbsentProvider
from infranetes.providers.interface import Instance, IPodProvider
from infranetes_common.concurrency import deferred, settled, sleep, start
from infranetes_common.errors import InfranetesError

_log = Logger()


class PodsService(Service):
    """Loads all records from the store and resumes what they record; stops without touching a VM.

    :param make_provider: makes a provider that records name and no handler does.
    :ivar pod_cidr: the subnet for pods, as kubelet has set it; "" before it has.
    """

    def __init__(self, node: Node, make_provider: Callable[[str], IPodProvider]) -> None:
        self.node = node
        self._make_provider = make_provider
        self.pod_cidr = ""

    @deferred
    async def startService(self) -> None:
        """Open the store and load its records.

        :raise InfranetesError: the store can't be opened."""
        Service.startService(self)
        node = self.node
        contents = await node.inventory.store.open()
        self.pod_cidr = contents.settings.get(POD_CIDR, "")
        self._find_providers(contents)
        await node.features.load(contents)
        for pool, records in pools_with(node.pools, node.providers, contents.pool):
            pool.load(records, contents.settings)
        await node.reconciler.load(contents, lambda: sleep(node.reactor, 0))
        node.renewal.start()
        node.timekeeping.start()
        await node.features.resume(node.inventory)

    def _find_providers(self, contents: Contents) -> None:
        """Find or make the providers of all records, also of those that no handler names any more."""
        recorded = {record.provider for record in contents.sandboxes} | {
            record.provider for record in contents.pool
        }
        for name in sorted(recorded - {*self.node.providers.by_name}):
            try:
                provider = self._make_provider(name)
            except InfranetesError as error:
                _log.error(
                    "provider {provider}, which has recorded VMs, is not available: {error}",
                    provider=name,
                    error=error,
                )
                provider = cast(IPodProvider, AbsentProvider(name, str(error)))
            self.node.providers.add(provider)

    def provider_started(self, node_provider: NodeProvider) -> None:
        """Go on with what has to wait for the provider."""
        node_provider.provider.watch(partial(self._ended, node_provider))
        node_provider.trouble = ""
        node_provider.ready.succeed(None)
        for pool in self.node.pools.of(node_provider):
            pool.provider_ready()
        self.node.reconciler.provider_ready(node_provider)

    def _ended(self, node_provider: NodeProvider, instance: Instance) -> None:
        self.node.sandboxes.ended(node_provider, instance)
        for pool in self.node.pools.of(node_provider):
            pool.ended(instance)

    def shown(self) -> int:
        """Return how many sandboxes the CRI shows."""
        return sum(sandbox.state in SHOWN_SANDBOXES for sandbox in self.node.inventory)

    @deferred
    async def stopService(self) -> None:
        """Leave what is under way for the next daemon. The VMs go on."""
        Service.stopService(self)
        node = self.node
        node.stopping.succeed(None)
        node.reconciler.stop()
        node.renewal.stop()
        node.timekeeping.stop()
        for pool in node.pools.all():
            await pool.stop()
        await node.logs.stop(node.inventory.containers.values())
        await node.features.stop()
        closing: list[Deferred[None]] = []
        for sandbox in node.inventory:
            sandbox.leave()
            if sandbox.client is not None:
                closing.append(start(sandbox.client.close()))
        for result in await settled(closing):  # concurrently, since a silent agent takes seconds
            if isinstance(result, Failure):
                _log.debug("an agent's connection failed to close: {error}", error=result.value)
