# SPDX-License-Identifier: Apache-2.0
"""Tests of faults between a provider and any cloud: nothing is leaked or lost."""

from __future__ import annotations

import time
from typing import ClassVar

import attrs

from infranetes.providers.cloud.provider import CloudProvider
from infranetes.providers.interface import Instance, InstanceState, Size
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InfranetesError,
    ResourceExhausted,
    Unavailable,
)
from infranetes_common.wire import vmserver
from tests.infranetes.providers.cloud.case import Call, CloudCase
from tests.infranetes.providers.cloud.lifecycle_case import LifecycleCase
from tests.support.clouds.faults import NEVER, NO_AGENT, FaultKind
from txgrpc import GrpcError


class FaultCase(LifecycleCase, CloudCase):
    """Base class of tests with faults."""

    def launches(self) -> list[Call]:
        """Return the requested launches."""
        return [one for one in self.world.requests if one["Action"] == self.launch_action]


class PassingFaults(FaultCase):
    """Faults after which a retried call succeeds."""

    tells_retry_after: ClassVar[bool] = True  # whether libcloud's driver does

    async def test_throttling_of_a_third_of_the_calls(self) -> None:
        fault = self.world.faults.add(FaultKind.THROTTLE, share=0.3)
        await self.run_lifecycles(4)
        self.assertGreater(fault.happened, 0)

    async def test_a_retry_after_is_honoured_if_the_driver_tells_it(self) -> None:
        provider = await self.started()
        self.world.faults.add(FaultKind.THROTTLE, only=self.is_list, times=1, retry_after=1.0)
        begun = time.monotonic()
        await self.within(provider.list())
        if self.tells_retry_after:
            self.assertGreaterEqual(time.monotonic() - begun, 0.9)

    async def test_errors_of_the_server(self) -> None:
        self.world.faults.add(FaultKind.ERROR, share=0.2)
        await self.run_lifecycles(4)

    async def test_errors_after_the_cloud_acted(self) -> None:
        self.world.faults.add(FaultKind.ACTED, share=0.2)
        await self.run_lifecycles(4)

    async def test_answers_that_are_lost_after_the_cloud_acted(self) -> None:
        fault = self.world.faults.add(FaultKind.LOST, self.launch_action, times=2)
        self.world.faults.add(FaultKind.LOST, self.destroy_action, times=1)
        await self.run_lifecycles(1)
        self.assertEqual(fault.happened, max(self.asked_again, 1))
        self.assertEqual(len(self.launches()), self.asked_again + 1)
        self.assertEqual(len({self.key(one) for one in self.launches()}), 1)

    async def test_the_end_of_a_vm_is_noticed_when_its_agent_falls_silent(self) -> None:
        """The next list would show it in an hour."""
        self.settings.update(watch_seconds=3600.0, doubt_seconds=0.5)
        provider = await self.started()
        assert isinstance(provider, CloudProvider)
        ended: list[Instance] = []
        provider.watch(ended.append)
        instance, other = [await self.running(provider, self.spec()) for _ in range(2)]
        provider.agent_heard(instance.id, True)
        self.world.faults.add(FaultKind.THROTTLE, share=0.3)
        self.world.end(instance.id)
        provider.agent_heard(instance.id, False)
        await self.until(lambda: ended, "its end is noticed")
        self.assertEqual([(one.id, one.state) for one in ended], [(instance.id, InstanceState.ENDED)])
        self.world.faults.clear()
        for one in (instance, other):
            await self.within(provider.destroy(one.id))
        self.assertEqual(self.world.holdings(), [])

    async def test_lists_that_lack_a_new_vm(self) -> None:
        provider = await self.started()
        await self.within(provider.list())
        stale = self.world.faults.add(FaultKind.STALE, only=self.is_list)
        spec = self.spec()
        launched = await self.within(provider.launch(spec))
        self.assertEqual([one.id for one in await self.within(provider.list())], [launched.id])
        if not self.looks_alone:
            await self.refused(DeadlineExceeded, provider.wait_running(launched.id, 0.5))
            self.assertEqual((await self.within(provider.launch(spec))).id, launched.id)
            self.world.faults.rules.remove(stale)
        instance = await self.within(provider.wait_running(launched.id, self.boot_timeout))
        await self.within(provider.destroy(instance.id))

    async def test_lists_that_still_show_an_ended_vm(self) -> None:
        provider = await self.started()
        ended: list[Instance] = []
        provider.watch(ended.append)
        instance = await self.running(provider, self.spec())
        await self.within(provider.list())
        self.world.faults.add(FaultKind.STALE, only=self.is_list)
        await self.within(provider.destroy(instance.id))
        self.assertEqual(await self.within(provider.list()), [])
        await self.until_asked(3, self.list_action)
        self.assertEqual(ended, [])
        self.world.faults.clear()

    async def test_a_daemon_that_was_killed_before_its_launch_was_listed(self) -> None:
        """The next daemon does not see the VM, launches with another identity, and gets the same VM."""
        provider = await self.started()
        await self.within(provider.list())
        spec = self.spec()
        launched = await self.within(provider.launch(spec))
        await self.within(provider.stop())
        self.world.faults.add(FaultKind.STALE, self.list_action, times=2)
        provider = await self.started()
        certificate, key = self.authority.issue_vm(spec.sandbox_id, 3600)
        renewed = attrs.evolve(spec.identity, certificate_pem=certificate, key_pem=key)
        adopted = await self.running(provider, attrs.evolve(spec, identity=renewed))
        self.assertEqual(adopted.id, launched.id)
        self.assertEqual((await self.agent_info(adopted)).sandbox_id, spec.sandbox_id)
        self.assertEqual(len(self.world.running()), 1)

    async def test_a_new_vm_that_not_all_of_the_cloud_knows_yet_is_destroyed(self) -> None:
        self.settings["settle_seconds"] = 20.0
        provider = await self.started()
        launched = await self.within(provider.launch(self.spec()))
        fault = self.world.faults.add(FaultKind.UNKNOWN, self.destroy_action, times=3)
        await self.within(provider.destroy(launched.id))
        self.assertEqual(fault.happened, 3)
        self.assertEqual(self.world.holdings(), [])

    async def test_a_vm_that_is_still_there_after_its_end_was_taken_is_destroyed_again(self) -> None:
        provider = await self.started()
        ignored = self.world.faults.add(FaultKind.IGNORED, self.destroy_action, times=1)
        instance = await self.running(provider, self.spec())
        await self.within(provider.destroy(instance.id))
        self.assertEqual(self.world.running(), [instance.id])
        self.assertEqual(await self.within(provider.list()), [])
        await self.until(lambda: not self.world.holdings(), "what the list shows is ended")
        self.assertEqual(ignored.happened, 1)

    async def test_a_daemon_that_was_killed_leaves_such_a_vm_to_the_next(self) -> None:
        provider = await self.started()
        self.world.faults.add(FaultKind.IGNORED, self.destroy_action, times=1)
        instance = await self.running(provider, self.spec())
        await self.within(provider.destroy(instance.id))
        await self.within(provider.stop())
        await self.started()
        await self.until(lambda: not self.world.holdings(), "the next daemon ends it")

    async def test_a_second_vm_of_a_token_is_destroyed(self) -> None:
        provider = await self.started()
        instance = await self.running(provider, self.spec())
        self.world.add_twin(instance.id)
        self.assertEqual(len(self.world.running()), 2)
        await self.until(lambda: len(self.world.running()) == 1, "the second VM is ended")
        self.assertEqual(self.world.running(), [instance.id])
        self.assertEqual([one.id for one in await self.within(provider.list())], [instance.id])


class LastingFaults(FaultCase):
    """Faults that make calls fail."""

    async def test_launches_whose_answers_are_always_lost(self) -> None:
        """What the launch has left is destroyed, at the latest when it appears in a list."""
        self.settings["retry_seconds"] = 0.5
        provider = await self.started()
        self.lose_launches()
        await self.refused(Unavailable, provider.launch(self.spec()))
        self.assertEqual(self.world.holdings(), [])

    async def test_a_vm_that_shows_up_after_its_launch_was_given_up(self) -> None:
        self.settings["retry_seconds"] = 0.5
        self.settings["settle_seconds"] = 5.0
        provider = await self.started()
        await self.within(provider.list())
        self.lose_launches()
        token: list[str] = []
        stale = self.world.faults.add(
            FaultKind.STALE, self.list_action, only=lambda each: _of_token(each, token)
        )
        spec = self.spec()
        token.append(spec.token)
        await self.refused(Unavailable, provider.launch(spec))
        self.world.faults.rules.remove(stale)
        await self.until(lambda: not self.world.holdings(), "what shows up is ended")

    async def test_a_vm_that_never_boots(self) -> None:
        self.world.behaviour = NEVER
        provider = await self.started()
        launched = await self.within(provider.launch(self.spec()))
        await self.refused(DeadlineExceeded, provider.wait_running(launched.id, 0.5))
        self.assertIs((await self.within(provider.get(launched.id))).state, InstanceState.PENDING)
        await self.within(provider.destroy(launched.id))
        self.assertEqual(self.world.holdings(), [])

    async def test_a_vm_without_an_agent(self) -> None:
        self.world.behaviour = NO_AGENT
        provider = await self.started()
        instance = await self.running(provider, self.spec())
        await self.assertFailure(self.agent(instance).Info(vmserver.InfoRequest(), timeout=5.0), GrpcError)
        await self.within(provider.destroy(instance.id))
        self.assertEqual(self.world.holdings(), [])

    async def test_a_full_quota(self) -> None:
        provider = await self.started()
        self.world.faults.add(FaultKind.QUOTA, self.launch_action)
        error = await self.refused(ResourceExhausted, provider.launch(self.spec()))
        self.assertIn(self.quota, str(error))
        self.assertEqual(len(self.launches()), 1)
        self.world.faults.clear()
        await self.run_lifecycle(provider)

    async def test_without_capacity_the_next_zone_and_then_the_next_size_is_tried(self) -> None:
        provider = await self.started()
        first, second = self.cheapest
        self.world.faults.add(
            FaultKind.CAPACITY, self.launch_action, only=lambda each: self.asked(each)[0] == first
        )
        instance = await self.running(provider, self.spec())
        self.assertEqual(instance.size, second)
        here, there = self.zones()
        self.assertEqual(
            [self.asked(one) for one in self.launches()], [(first, here), (first, there), (second, here)]
        )
        await self.within(provider.destroy(instance.id))
        self.assertEqual(self.world.holdings(), [])

    async def test_no_capacity_at_all(self) -> None:
        provider = await self.started()
        self.world.faults.add(FaultKind.CAPACITY, self.launch_action)
        error = await self.refused(ResourceExhausted, provider.launch(self.spec(size=Size(cpu_millis=4000))))
        self.assertIn(self.large, str(error))
        self.assertEqual(self.world.holdings(), [])

    async def test_credentials_that_are_revoked_and_restored(self) -> None:
        provider = await self.started()
        instance = await self.running(provider, self.spec())
        ended: list[Instance] = []
        provider.watch(ended.append)
        self.world.faults.add(FaultKind.REVOKED)
        for call in (
            lambda: provider.list(),
            lambda: provider.launch(self.spec()),
            lambda: provider.get(instance.id),
            lambda: provider.destroy(instance.id),
        ):
            self.assertIn("credentials", str(await self.refused(FailedPrecondition, call())))
        await self.until_asked(3)
        self.assertEqual(ended, [])
        self.world.faults.clear()
        await self.until_asked(2, self.list_action)  # what was refused before is over
        self.assertEqual(await self.within(provider.list()), [instance])
        self.assertEqual((await self.agent_info(instance)).sandbox_id, instance.sandbox_id)

    async def test_a_cloud_that_is_down_is_called_rarely(self) -> None:
        self.settings["retry_seconds"] = 1.0
        provider = await self.started()
        self.world.faults.add(FaultKind.ERROR)
        # A busy machine tries too few times in that while for the circuit to open at once.
        while "does not answer" not in str(await self.refused(Unavailable, provider.list())):
            pass
        before = len(self.world.requests)
        for _ in range(5):
            error = await self.refused(Unavailable, provider.list())
            self.assertIn("does not answer", str(error))
        self.assertEqual(len(self.world.requests), before)
        self.assertIn("not answering", provider.status()["cloud"])
        self.world.faults.clear()

    async def test_a_launch_that_is_cancelled_while_the_cloud_is_slow(self) -> None:
        provider = await self.started()
        self.world.faults.add(FaultKind.THROTTLE, self.launch_action, times=4)
        spec = self.spec()
        launching = provider.launch(spec)
        await self.sleep(0.05)
        launching.cancel()
        launching.addErrback(lambda failure: None)
        instance = await self.running(provider, spec)
        self.assertEqual(self.world.running(), [instance.id])

    async def test_a_launch_of_a_stopped_provider_is_adopted_by_the_next(self) -> None:
        provider = await self.started()
        spec = self.spec()
        lost = self.world.faults.add(FaultKind.LOST, self.launch_action, times=100)
        launching = self.assertFailure(provider.launch(spec), InfranetesError)
        while not lost.happened:
            await self.sleep(0.01)
        await self.within(provider.stop())
        await self.within(launching)
        self.world.faults.clear()
        provider = await self.started()
        instance = await self.running(provider, spec)
        self.assertEqual(self.world.running(), [instance.id])


class FamilyQuotas(FaultCase):
    """Quotas of one family of sizes."""

    async def test_a_full_quota_of_one_family_leaves_the_sizes_of_others(self) -> None:
        first, other = self.families
        self.settings["sizes"] = ["t3.*", "e2-*", "Standard_B*", other]
        provider = await self.started()
        self.world.faults.add(
            FaultKind.FAMILY_QUOTA, self.launch_action, only=lambda each: self.asked(each)[0] == first
        )
        launched = await self.within(provider.launch(self.spec()))
        self.assertEqual(launched.size, other)
        here = self.zones()[0]
        self.assertEqual([self.asked(one) for one in self.launches()], [(first, here), (other, here)])
        await self.within(provider.destroy(launched.id))
        self.assertEqual(self.world.holdings(), [])

    async def test_a_daemon_that_is_killed_while_it_tries_another_family(self) -> None:
        first, other = self.families
        self.settings["sizes"] = ["t3.*", "e2-*", "Standard_B*", other]
        provider = await self.started()
        self.world.faults.add(
            FaultKind.FAMILY_QUOTA, self.launch_action, only=lambda each: self.asked(each)[0] == first
        )
        lost = self.world.faults.add(FaultKind.LOST, self.launch_action)
        spec = self.spec()
        launching = self.assertFailure(provider.launch(spec), InfranetesError)
        await self.until(lambda: lost.happened, "the other family is asked for")
        await self.within(provider.stop())
        await self.within(launching)
        self.world.faults.rules.remove(lost)
        self.world.faults.add(FaultKind.STALE, self.list_action, times=1)
        provider = await self.started()
        launched = await self.within(provider.launch(spec))
        self.assertEqual((self.world.running(), launched.size), ([launched.id], other))
        await self.within(provider.destroy(launched.id))
        self.assertEqual(self.world.holdings(), [])

    async def test_full_quotas_of_all_families(self) -> None:
        first, other = self.families
        self.settings["sizes"] = ["t3.*", "e2-*", "Standard_B*", other]
        provider = await self.started()
        self.world.faults.add(FaultKind.FAMILY_QUOTA, self.launch_action)
        error = await self.refused(ResourceExhausted, provider.launch(self.spec()))
        self.assertIn(self.quota, str(error))
        self.assertIn("other families", str(error))
        self.assertEqual([self.asked(one)[0] for one in self.launches()], [first, other])
        self.assertEqual(self.world.holdings(), [])


def _of_token(call: Call, token: list[str]) -> bool:
    return bool(token) and any(token[0] in value for value in call.values())
