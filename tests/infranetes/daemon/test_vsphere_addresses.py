# SPDX-License-Identifier: Apache-2.0
"""Addresses that a node on vSphere assigns to its VMs, with daemons that are killed at each step."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from twisted.web.http_headers import Headers

from infranetes_common.concurrency.files import SUFFIX
from infranetes_common.wire import cri
from tests.harness.durations import slow
from tests.harness.needs import needs_netns, needs_tools
from tests.infranetes.daemon.cloud import CloudDaemonCase
from tests.support.clouds import tls, vcsim
from tests.support.clouds.soap import parameters_of
from tests.support.clouds.vsphere_machines import SimulatedVcenterMachines
from txgrpc import Code, GrpcError

# Around which request the daemon is killed, and how many VMs the pod has then. Its lease is always recorded.
MOMENTS = (
    ("before", "CloneVM_Task", 0),  # no VM was asked for
    ("after", "CloneVM_Task", 1),
    ("before", "PowerOffVM_Task", 1),
    ("after", "PowerOffVM_Task", 1),  # it is off, and not deleted
    ("before", "Destroy_Task", 1),
    ("after", "Destroy_Task", 0),  # the daemon has not been told that the VM is gone
)


@needs_netns
@needs_tools("vcsim")
class AddressTests(CloudDaemonCase):
    """A node with three addresses, and VMs that are separate machines, in which agents set the addresses."""

    provider = "vsphere"
    make_world = SimulatedVcenterMachines
    patience = 3.0

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        vcsim.shared()  # both take a moment, but only once
        tls.certificate()

    def leases(self) -> list[str]:
        """Return the recorded leases. A daemon that is killed while it writes one leaves a temporary file."""
        directory = self.root / "state" / "vsphere" / "addresses"
        names = [file.name for file in directory.iterdir()] if directory.exists() else []
        return sorted(name for name in names if not name.endswith(SUFFIX))

    def given(self) -> list[str]:
        """Return the addresses of all VMs."""
        return sorted(vcsim.extra_config(vm)["infranetes-address"] for vm in self.world.vms())

    async def address(self, sandbox: str) -> str:
        asked = cri.PodSandboxStatusRequest(pod_sandbox_id=sandbox)
        return str((await self.runtime.PodSandboxStatus(asked, timeout=10.0)).status.network.ip)

    def kill_at(self, when: str, action: str) -> None:
        """Kill the daemon around its next request for `action`, which is then lost or not answered."""
        real = self.world.call

        async def call(body: bytes, headers: Headers) -> Any:
            if parameters_of(body.decode())["Action"] != action:
                return await real(body, headers)
            self.world.call = real
            if when == "after":
                await real(body, headers)
            await self.kill()
            raise ConnectionError

        self.world.call = call

    async def surely(self, step: Callable[[], Awaitable[Any]]) -> Any:
        """Take a step, and if the daemon dies, retry it with the next daemon, as kubelet does."""
        try:
            return await step()
        except GrpcError as error:
            self.assertIs(error.code, Code.UNAVAILABLE)
        await self.ended()
        self.at_the_kill = len(self.leases()), len(self.given())
        await self.start()
        return await step()

    @slow(25, "the daemon is killed around each of six requests, and each next one looks for its VMs")
    async def test_no_address_is_lost_or_given_twice_whenever_the_daemon_is_killed(self) -> None:
        prefix = self.world.machines.gateway.rpartition(".")[0]
        addresses = [f"{prefix}.{number}" for number in (10, 11, 12)]
        await self.start()
        other = await self.run_pod("other", hostname="web-0")
        has = await self.address(other)
        container = await self.run_container(other, self.box(script="sleep 1000"))
        request = cri.ExecSyncRequest(container_id=container, cmd=["hostname", "-i"], timeout=20)
        inside = (await self.runtime.ExecSync(request, timeout=30.0)).stdout
        self.assertEqual(inside.decode().split(), [has])
        for number, (when, action, vms) in enumerate(MOMENTS):
            step, name = f"{when} {action}", f"pod{number}"
            self.kill_at(when, action)
            sandbox = await self.surely(partial(self.run_pod, name))
            self.assertEqual((await self.address(other), self.leases()), (has, self.given()), step)
            self.assertEqual(len(self.leases()), 2, step)
            self.assertIn(await self.address(sandbox), set(addresses) - {has}, step)
            await self.surely(partial(self.remove_pod, sandbox))
            self.assertEqual(self.at_the_kill, (2, 1 + vms), step)
            await self.until(lambda: self.given() == [has], f"no VM is left, {step}")
            if number < len(MOMENTS) - 1:
                self.assertEqual(self.leases(), [has], step)
        # Only after lists have agreed for a minute is the last VM known to be gone.
        self.assertEqual(len(self.leases()), 2)
        last = await self.run_pod("last")
        self.assertEqual(sorted({*self.leases(), await self.address(last)}), addresses)
        said = await self.refused(Code.RESOURCE_EXHAUSTED, self.run_pod("more"))
        self.assertIn("all 3 addresses of address_ranges are taken", said)
        for each in (other, last):
            await self.remove_pod(each)
        self.assertEqual(len(self.leases()), 1)
