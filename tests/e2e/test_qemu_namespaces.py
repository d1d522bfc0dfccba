# SPDX-License-Identifier: Apache-2.0
"""Real VMs in network namespaces: what a VM sends and receives passes through its pod's namespace."""

from __future__ import annotations

import subprocess

import attrs
from twisted.trial.unittest import TestCase

from infranetes.providers.interface import Instance
from tests.contract.pod_provider_case import reactor
from tests.e2e.namespace_case import MTU, ROUTE_MTU, NamespaceCase
from tests.e2e.qemu_case import said
from tests.support.echo import answers


class NamespaceTrafficTests(NamespaceCase, TestCase):
    """A VM sends and receives its pod's traffic."""

    async def test_a_vm_is_its_pod_to_the_node(self) -> None:
        provider = await self.started()
        spec = self.spec()
        [pod] = self.pods
        instance: Instance = await self.running(provider, spec)
        self.assertEqual((instance.address, instance.agent_host), (pod.address, pod.address))
        self.assertEqual(instance.more_addresses, (pod.address6,))
        self.assertEqual((await self.agent_info(instance)).sandbox_id, spec.sandbox_id)
        # Packets as large as the route allows, and with the other family as large as the link allows.
        self.assertTrue(await answers(reactor, pod.address, ROUTE_MTU - 28))
        self.assertTrue(await answers(reactor, pod.address6, MTU - 48))
        # The node's rules on its end of the link apply.
        chain = f'type filter hook input priority 0; iifname "{pod.link}" ip protocol icmp drop'
        script = f"table inet {pod.link} {{\nchain input {{\n{chain}\n}}\n}}\n"
        subprocess.run(["nft", "-f", "-"], input=script.encode(), check=True, capture_output=True)
        self.addCleanup(subprocess.run, ["nft", "delete", "table", "inet", pod.link], capture_output=True)
        self.assertTrue(await answers(reactor, pod.address6))
        self.assertFalse(await answers(reactor, pod.address, seconds=1.0))
        self.assertEqual((await self.agent_info(instance)).sandbox_id, spec.sandbox_id)
        said("nft", "delete", "table", "inet", pod.link)

        provider = await self.restarted(provider)
        addresses = [(each.address, each.more_addresses) for each in await provider.list()]
        self.assertEqual(addresses, [(pod.address, (pod.address6,))])
        self.assertTrue(await answers(reactor, pod.address))
        await self.within(provider.destroy(instance.id))
        self.assertEqual(pod.taps(), [])
        # The namespace serves another VM, as after a launch that failed.
        again = await self.running(provider, attrs.evolve(super().spec(), attachment=pod.attachment))
        self.assertEqual((await self.agent_info(again)).sandbox_id, again.sandbox_id)
