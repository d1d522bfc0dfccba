# SPDX-License-Identifier: Apache-2.0
"""A real VM's pod is held still, goes on, and becomes another pod, as in a clone."""

from __future__ import annotations

from typing import Any

import attrs
from twisted.internet.endpoints import UNIXClientEndpoint, connectProtocol
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from infranetes.machines.agent.client import AgentClient
from infranetes.machines.keeping import Adoption, Hook
from infranetes.providers.interface import Instance, InstanceSpec
from infranetes.providers.qemu.program.identity_port import IdentityPort
from infranetes.providers.qemu.program.sockets import IDENTITY
from infranetes_common.errors import FailedPrecondition
from infranetes_common.identity import Network, encode
from infranetes_common.wire import cri
from tests.contract.pod_provider_case import reactor
from tests.e2e.held_pod import BOUNDS, HeldPodCase
from tests.harness.durations import slow

OLD, NEW, UNWANTED = "01d" * 10, "9ec" * 10, "0dd" * 10
SECRET, CLONES_SECRET = "5ec" * 10, "c1e" * 10


@slow(60, "its VM is emulated where there is no KVM")
class HeldPodTests(HeldPodCase, TestCase):
    """The agent's calls, as the node makes them."""

    async def became(self, instance: Instance, spec: InstanceSpec, address: str) -> InstanceSpec:
        """Give the VM another identity, as a clone is given its own; return that."""
        network = Network(
            mac="02:00:00:0c:10:0e", address=f"{address}/24", gateway=address.rpartition(".")[0] + ".1"
        )
        other = self.spec()
        identity = attrs.evolve(other.identity, network=network, hostname="clone")
        provider: Any = self.providers[-1]
        path = str(provider._vms[instance.token].paths.sockets / IDENTITY)
        port = await connectProtocol(UNIXClientEndpoint(reactor, path), IdentityPort())
        self.addCleanup(port.close)
        port.send(encode(identity))
        until = reactor.seconds() + 60
        while (await self.agent_info(instance)).sandbox_id != other.sandbox_id:
            self.assertLess(reactor.seconds(), until, "it does not become another")
        return other

    async def test_it_is_held_goes_on_and_becomes_another(self) -> None:
        spec, instance, agent = await self.begun()
        image = await self.load(agent)
        sandbox = cri.PodSandboxConfig(hostname="pod")
        await agent.configure(sandbox, cri.DNSConfig())
        await self.put(agent, SECRET, b"tell nobody")
        config = self.config(SECRET, instance.address)
        for id in (OLD, UNWANTED):
            await agent.create(id, image, config, sandbox)
        for id in (OLD, UNWANTED):
            await agent.start(id)
        await self.counts(agent, OLD)

        began = reactor.seconds()
        hooks = {OLD: Hook(("sh", "-c", "echo told >/told"))}
        self.assertEqual(set(await agent.hold(hooks, {SECRET}, seconds=60.0)), {OLD, UNWANTED})
        print(f"held in {reactor.seconds() - began:.2f} s", flush=True)
        self.assertTrue((await agent.info()).held)
        with self.assertRaisesRegex(FailedPrecondition, "held still"):
            await agent.exec_sync(OLD, ["true"], 5, 10.0, 100)
        listed = await agent.list_volume(SECRET, BOUNDS)
        self.assertEqual([each.size for each in listed.values()], [0])
        await deferLater(reactor, 2.0)
        await self.put(agent, SECRET, b"tell nobody")
        began = reactor.seconds()
        await agent.release()
        print(f"released in {reactor.seconds() - began:.2f} s", flush=True)
        self.assertEqual(await self.said(agent, OLD, "cat", "/key", "/told"), "tell nobodytold")
        reached = await self.counts(agent, OLD)
        uuid = await self.said(agent, OLD, "cat", "/proc/sys/kernel/random/boot_id")

        await agent.hold({}, {SECRET}, seconds=60.0)
        before = await agent.info()
        own = instance.address.rpartition(".")[0] + ".250"
        began = reactor.seconds()
        other = await self.became(instance, spec, own)
        print(f"another in {reactor.seconds() - began:.2f} s", flush=True)
        clone = AgentClient(other.sandbox_id, self.channel(instance))
        after = await clone.info()
        self.assertTrue(after.held)
        self.assertNotIn(after.boot_id, (before.boot_id, ""))
        self.assertEqual((await clone.stats()).containers, [])
        with self.assertRaises(FailedPrecondition):
            await clone.release()

        sandbox = cri.PodSandboxConfig(hostname="clone")
        await clone.configure(sandbox, cri.DNSConfig())
        config = self.config(CLONES_SECRET, own)
        hook = Hook(("sh", "-c", "echo $ADDRESS >/cloned"))
        (state,) = await clone.adopt([Adoption(OLD, NEW, config, hook)], {SECRET: CLONES_SECRET}, sandbox)
        self.assertEqual((state.id, state.state), (NEW, cri.CONTAINER_CREATED))
        await self.put(clone, CLONES_SECRET, b"the clone's own")
        await clone.remove(UNWANTED)
        self.assertEqual((await clone.start(NEW)).state, cri.CONTAINER_RUNNING)
        self.assertGreater(await self.counts(clone, NEW), reached)
        self.assertFalse((await clone.info()).held)
        self.assertEqual(await self.said(clone, NEW, "cat", "/cloned", "/key"), f"{own}\nthe clone's own")
        self.assertEqual(await self.said(clone, NEW, "hostname"), "clone")
        addresses = await self.said(clone, NEW, "ip", "-4", "address", "show")
        self.assertIn(own, addresses)
        self.assertNotIn(f"{instance.address}/", addresses)
        self.assertEqual(await self.said(clone, NEW, "cat", "/closed"), "closed")
        self.assertTrue(uuid)
        self.assertEqual([each.id for each in (await clone.stats()).containers], [NEW])
        self.assertEqual((await clone.stop(NEW, 0)).exit_code, 137)
        await clone.remove(NEW)
