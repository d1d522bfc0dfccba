# SPDX-License-Identifier: Apache-2.0
"""The sandboxes, their VMs and the pool over the daemon's life."""

from __future__ import annotations

from twisted.application.service import Service
from twisted.internet.defer import Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.cri.status import POD_CIDR
from infranetes.pods.containers import Containers
from infranetes.pods.context import NodeContext
from infranetes.pods.host_ports import ports_in_force
from infranetes.pods.inventory import Sandbox
from infranetes.pods.pod_network import restore_pod_network
from infranetes.pods.reconcile import Reconciler
from infranetes.pods.sandboxes import Sandboxes
from infranetes.pods.states import SHOWN_SANDBOXES
from infranetes.providers.interface import Instance
from infranetes_common.concurrency import deferred, settled, sleep, start

_log = Logger()


class PodsService(Service):
    """Loads all records from the store and takes up what they tell; stops without touching a VM.

    :ivar pod_cidr: the subnet for pods, as kubelet has set it; "" before it has.
    """

    def __init__(self, node: NodeContext) -> None:
        self.node = node
        self.sandboxes = Sandboxes(node)
        self.containers = Containers(node, self.sandboxes)
        self.reconciler = Reconciler(node, self.sandboxes, self.containers)
        self.pod_cidr = ""

    @deferred
    async def startService(self) -> None:
        """Open the store and load its records.

        :raise InfranetesError: the store can't be opened."""
        Service.startService(self)
        node = self.node
        contents = await node.store.open()
        self.pod_cidr = contents.settings.get(POD_CIDR, "")
        await node.volumes.load()
        node.pool.load(contents.pool, contents.settings)
        await self.reconciler.load(contents, lambda: sleep(node.clock, 0))
        node.renewal.start()
        await node.volumes.resume(node.inventory)
        await restore_pod_network(node, self.pod_cidr)
        await node.hostports.restore(ports_in_force(node.inventory))

    def provider_started(self) -> None:
        """Go on with what has to wait for the provider."""
        self.node.provider.watch(self._ended)
        self.node.trouble = ""
        self.node.ready.succeed(None)
        self.node.pool.provider_ready()
        self.reconciler.provider_ready()

    def _ended(self, instance: Instance) -> None:
        self.sandboxes.ended(instance)
        self.node.pool.ended(instance)

    def shown(self) -> int:
        """Return how many sandboxes the CRI shows."""
        return sum(one.state in SHOWN_SANDBOXES for one in self.node.inventory)

    def known_key(self, id: str) -> str:
        """Return the key of the certificate that a VM was last given; "" if the VM is unknown."""
        one = self.node.inventory.sandboxes.get(id) or self.node.pool.members.get(id)
        return one.record.certificate_key if one is not None else ""

    @deferred
    async def stopService(self) -> None:
        """Leave what is under way for the next daemon. The VMs go on."""
        Service.stopService(self)
        node = self.node
        node.stopping = True
        self.reconciler.stop()
        node.renewal.stop()
        if node.firewalls is not None:
            node.firewalls.stop()
        if node.overlay is not None:
            node.overlay.stop()
        await node.pool.stop()
        await node.logs.stop(node.inventory.containers.values())
        await node.volumes.stop()
        closing: list[Deferred[None]] = []
        for sandbox in node.inventory:
            _cancel(sandbox)
            if sandbox.client is not None:
                closing.append(start(sandbox.client.close()))
        for result in await settled(closing):  # all at once, since a silent agent takes seconds
            if isinstance(result, Failure):
                _log.debug("an agent's connection failed to close: {error}", error=result.value)


def _cancel(sandbox: Sandbox) -> None:
    """End what is under way for a sandbox, and its agent's stream of events."""
    flights = [sandbox.launching, sandbox.stopping, sandbox.removing, sandbox.ending]
    for container in sandbox.containers.values():
        flights += [container.creating, container.removing]
    sandbox.loads.cancel()
    for flight in flights:
        if flight is not None and not flight.done:
            flight.cancel()
    if sandbox.deserted is not None and sandbox.deserted.active():
        sandbox.deserted.cancel()
    if sandbox.watch is not None:
        sandbox.watch.stop()
    if sandbox.machine.rules is not None:
        sandbox.machine.rules.stop()
