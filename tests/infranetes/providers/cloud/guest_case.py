# SPDX-License-Identifier: Apache-2.0
"""VMs without our agent at a simulated cloud, by the `IHypervisor` of the provider."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import attrs
from zope.interface.verify import verifyObject

from infranetes.providers.hypervisor import GuestState, GuestStatus, IBootsGuests, IHypervisor
from infranetes.providers.interface import Instance, InstanceSpec, InstanceState, VmRequest
from infranetes.providers.machine_images import Cd, GuestBoot
from infranetes_common.errors import FailedPrecondition, NotFound, NotOffered, Unavailable
from tests.infranetes.providers.cloud.world_case import WorldCase

USER_DATA = b"#cloud-config\nruncmd: [date]\n"


class GuestCase(WorldCase):
    """A VM whose image is without our agent. A mixin."""

    world: Any
    failure: ClassVar[str] = "its host is gone"
    spot: ClassVar[bool] = False  # whether it may fail a spot VM alone

    def user_data(self) -> bytes:
        """Return that of the VM that was launched last."""
        raise NotImplementedError

    def fail_vm(self, id: str) -> None:
        """Have the cloud fail a VM, with the words `failure`."""
        raise NotImplementedError

    provider: Any  # a CloudProvider

    async def request(self, user_data: bytes = USER_DATA) -> InstanceSpec:
        """Return what such a server is asked for with."""
        image = await self.world.guest_image("web:1.0")
        return attrs.evolve(
            self.spec(),
            request=VmRequest(
                image=image,
                guest=GuestBoot(user_data),
                annotations={"infranetes.io/spot": "true"} if self.spot else {},
            ),
        )

    async def prepared(self) -> tuple[Instance, IHypervisor]:
        """Launch a server; return it, and its hypervisor."""
        self.provider = await self.started()
        instance = await self.running(self.provider, await self.request())
        return instance, self.provider.hypervisor(instance.id)

    async def told(
        self, hypervisor: IHypervisor, does: Callable[[], Awaitable[object] | None]
    ) -> GuestStatus:
        """Return the status of which `does` makes this be told."""
        told: list[GuestStatus] = []
        hypervisor.watch(told.append)
        if (work := does()) is not None:
            await work
        await self.until(lambda: told, "it is told")
        self.assertEqual(told, [await hypervisor.status()])
        return told[0]

    async def test_it_is_told_its_user_data_and_nothing_else(self) -> None:
        instance, hypervisor = await self.prepared()
        self.assertTrue(verifyObject(IBootsGuests, self.provider))
        self.assertTrue(verifyObject(IHypervisor, hypervisor))
        self.assertEqual((instance.state, instance.agent_port), (InstanceState.RUNNING, 0))
        self.assertTrue(instance.agent_host)
        self.assertEqual(self.user_data(), USER_DATA)

    async def test_it_counts_as_prepared_until_it_is_executed(self) -> None:
        _, hypervisor = await self.prepared()
        self.assertEqual(await hypervisor.status(), GuestStatus(GuestState.PREPARED))
        status = await self.told(hypervisor, hypervisor.execute)
        self.assertIs(status.state, GuestState.RUNNING)
        self.assertTrue(status.started_at)
        self.assertEqual(await hypervisor.execute(), status)

    async def test_later_providers_know_what_was_known(self) -> None:
        instance, _ = await self.prepared()
        self.provider = await self.restarted(self.provider)
        hypervisor = self.provider.hypervisor(instance.id)
        self.assertEqual(await hypervisor.status(), GuestStatus(GuestState.PREPARED))
        status = await hypervisor.execute()
        said = await hypervisor.console.read(0, 1000)
        self.assertIn(b"booted with", said)
        self.provider = await self.restarted(self.provider)
        hypervisor = self.provider.hypervisor(instance.id)
        self.assertEqual(await hypervisor.status(), status)
        self.assertEqual(await hypervisor.console.read(0, 1000), said)
        self.assertEqual((await self.provider.get(instance.id)).agent_port, 0)
        self.world.end(instance.id)
        self.provider = await self.restarted(self.provider)
        ended = await self.provider.hypervisor(instance.id).status()
        self.assertEqual((ended.state, ended.exit_code), (GuestState.OFF, 0))
        self.provider = await self.restarted(self.provider)
        self.assertEqual(await self.provider.hypervisor(instance.id).status(), ended)

    async def test_a_guest_that_powers_off_has_ended_and_its_vm_stays(self) -> None:
        instance, hypervisor = await self.prepared()
        ends: list[Instance] = []
        self.provider.watch(ends.append)
        await hypervisor.execute()
        self.world.guests.say(instance.id, "last words\n")
        status = await self.told(hypervisor, lambda: self.world.end(instance.id))
        self.assertEqual((status.state, status.exit_code, status.reason), (GuestState.OFF, 0, ""))
        self.assertTrue(hypervisor.console.ended)
        self.assertIn(b"last words", await hypervisor.console.read(0, 1000))
        self.assertIs((await self.provider.get(instance.id)).state, InstanceState.RUNNING)
        self.assertEqual([one.state for one in await self.provider.list()], [InstanceState.RUNNING])
        self.assertEqual(ends, [], "the end of its guest is its hypervisor's to tell")
        self.assertEqual(await hypervisor.execute(), status)
        self.assertEqual(await hypervisor.switch_off(), status)
        await self.refused(Unavailable, hypervisor.press_power_button())

    async def test_one_that_the_cloud_has_failed_has_crashed(self) -> None:
        instance, hypervisor = await self.prepared()
        await hypervisor.execute()
        status = await self.told(hypervisor, lambda: self.fail_vm(instance.id))
        self.assertEqual((status.state, status.exit_code), (GuestState.CRASHED, 1))
        self.assertEqual(status.reason, "VMFailed")
        self.assertIn(self.failure, status.message)

    async def test_its_power_button_is_the_clouds_stop(self) -> None:
        instance, hypervisor = await self.prepared()
        await self.refused(Unavailable, hypervisor.press_power_button())
        await hypervisor.execute()
        status = await self.told(hypervisor, hypervisor.press_power_button)
        self.assertEqual(self.world.guests.pressed, [instance.id])
        self.assertEqual((status.state, status.exit_code), (GuestState.OFF, 0))

    async def test_one_that_does_not_listen_is_ended_at_once(self) -> None:
        instance, hypervisor = await self.prepared()
        self.world.guests.obeys = False
        await hypervisor.execute()
        await hypervisor.press_power_button()
        await hypervisor.press_power_button()
        self.assertIs((await hypervisor.status()).state, GuestState.RUNNING)
        status = await self.told(hypervisor, hypervisor.switch_off)
        self.assertEqual((status.state, status.exit_code), (GuestState.OFF, 137))
        self.assertEqual(self.world.holdings(), [])
        self.assertIn(b"booted with", await hypervisor.console.read(0, 1000), "its last words are kept")
        await self.provider.destroy(instance.id)
        await self.refused(NotFound, hypervisor.status())

    async def test_of_one_that_is_destroyed_there_is_nothing(self) -> None:
        instance, hypervisor = await self.prepared()
        await self.provider.destroy(instance.id)
        for call in (hypervisor.status, hypervisor.execute, hypervisor.usage, hypervisor.network):
            await self.refused(NotFound, call())
        self.assertRaises(NotFound, self.provider.hypervisor, instance.id)
        self.assertEqual(list((self.state_dir / self.provider_name / "guests").iterdir()), [])

    async def test_what_a_cloud_does_not_have_is_not_offered(self) -> None:
        _, hypervisor = await self.prepared()
        await hypervisor.execute()
        self.assertEqual(hypervisor.drives, 0)
        self.assertIsNone(hypervisor.guest_agent())
        self.assertIsNone(hypervisor.has_address())
        self.assertIsNone((await hypervisor.usage()).memory_bytes)
        await hypervisor.insert_cds([])
        for call in (hypervisor.network, hypervisor.screenshot, lambda: hypervisor.insert_cds([Cd("x", {})])):
            await self.refused(NotOffered, call())
        self.assertRaises(NotOffered, hypervisor.screen)
        await self.refused(FailedPrecondition, hypervisor.console.write(b"x"))

    async def test_a_vm_with_our_agent_is_known_by_that(self) -> None:
        provider: Any = await self.started()
        instance = await self.running(provider, self.spec())
        self.assertRaises(NotFound, provider.hypervisor, instance.id)
        self.assertNotEqual(instance.agent_port, 0)

    async def test_a_launch_that_fails_leaves_nothing(self) -> None:
        provider: Any = await self.started()
        spec = await self.request()
        self.world.deregister(spec.request.image)
        await self.refused(Exception, provider.launch(spec))
        self.assertEqual(list((self.state_dir / self.provider_name / "guests").iterdir()), [])
