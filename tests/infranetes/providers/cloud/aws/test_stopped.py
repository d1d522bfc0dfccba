# SPDX-License-Identifier: Apache-2.0
"""EC2 instances of the pool are stopped until a pod claims one."""

from __future__ import annotations

from typing import Any, cast
from unittest import mock

from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from infranetes.providers.interface import Instance, InstanceState, VmRequest
from infranetes.providers.stopping import IStopsVms
from infranetes_common.errors import InvalidArgument, Unavailable
from tests.contract.stopped_vms import SECONDS, StoppedVmsContract
from tests.infranetes.providers.cloud.case import AwsCase
from tests.support.clouds.faults import FaultKind


class AwsStoppedVmsTests(AwsCase, StoppedVmsContract, TestCase):
    """The contract of providers that stop and start VMs, and what else there is to it at EC2."""

    def refuse_starts(self) -> None:
        self.world.start_refusal = "InsufficientInstanceCapacity"

    async def end_stopped(self, instance: Instance) -> None:
        self.world.end(instance.id)

    async def at_rest(self, instance: Instance) -> bytes:
        return self.world.rest_of(instance.id)

    def asked(self, *actions: str) -> list[str]:  # type: ignore[override]
        """Return which of these calls were made, in their order."""
        return [each["Action"] for each in self.world.requests if each["Action"] in actions]

    def recorded(self) -> list[str]:
        """Return the tokens of the VMs that are recorded as stopped."""
        return [file.name for file in (self.state_dir / "aws" / "stopped").iterdir()]

    async def test_its_user_data_is_emptied_once_it_is_stopped_and_filled_before_it_is_started(self) -> None:
        self.settings["stopped_price"] = 7.3
        provider = await self.started()
        spec = self.spec()
        stopped = await self.stopped(provider, spec)
        self.assertEqual(self.recorded(), [spec.token])
        self.assertEqual(stopped.cost_per_hour, 0.01)
        self.assertEqual((stopped.address, stopped.agent_host, stopped.agent_port), ("", "", 0))
        await self.running(provider, self.again(spec))
        self.assertEqual(
            self.asked("StopInstances", "StartInstances", "ModifyInstanceAttribute", "TerminateInstances"),
            ["StopInstances", "ModifyInstanceAttribute", "ModifyInstanceAttribute", "StartInstances"],
        )
        self.assertEqual(self.recorded(), [], "the next daemon takes one that halts for one that has ended")

    async def test_a_stop_is_recorded_before_the_cloud_is_asked_and_asked_for_once(self) -> None:
        provider: Any = await self.started()
        instance = await self.running(provider, self.spec())
        seen: list[list[str]] = []
        stop = provider._cloud._thd_stop

        def stopping(driver: Any, vm: Any) -> Any:
            seen.append(self.recorded())
            return stop(driver, vm)

        with mock.patch.object(type(provider._cloud), "_thd_stop", staticmethod(stopping)):
            for _ in range(2):
                await self.stop_it(provider, instance)
        self.assertEqual(seen, [[instance.token]])

    async def test_one_that_somebody_else_stops_has_ended_also_after_it_was_stopped_and_started(self) -> None:
        provider = await self.started()
        ended: list[Instance] = []
        provider.watch(ended.append)
        spec = self.spec()
        await self.stopped(provider, spec)
        instance = await self.running(provider, self.again(spec))
        await self.sleep(1.2)  # until what the cloud says is no longer old
        await deferToThread(self.world.ec2.stop_instances, InstanceIds=[instance.id])
        await self.until(lambda: ended, "the VM's end is told")
        self.assertIs((await self.within(provider.get(instance.id))).state, InstanceState.ENDED)

    async def test_answers_that_are_lost_change_nothing(self) -> None:
        provider = await self.started()
        spec = self.spec()
        instance = await self.running(provider, spec)
        for action in ("StopInstances", "ModifyInstanceAttribute"):
            self.world.faults.add(FaultKind.LOST, action, times=1)
        await self.stop_it(provider, instance)
        for action in ("StartInstances", "ModifyInstanceAttribute"):
            self.world.faults.add(FaultKind.LOST, action, times=1)
        started = await self.running(provider, self.again(spec))
        self.assertEqual(started.id, instance.id)
        await self.assert_executes(started)

    async def test_what_can_not_be_stopped_goes_on_and_says_why(self) -> None:
        provider = await self.started()
        stopper = cast(IStopsVms, provider)
        failure = self.assertRaises(
            InvalidArgument, stopper.check_stoppable, VmRequest(annotations={"infranetes.io/spot": "true"})
        )
        self.assertIn("spot", str(failure))
        instance = await self.running(provider, self.spec())
        self.world.stop_refusal = "UnsupportedOperation"
        for _ in range(2):
            error = await self.refused(InvalidArgument, stopper.stop_vm(instance.id, SECONDS))
            self.assertIn("EBS", str(error))
        self.assertEqual(self.recorded(), [])
        await self.assert_executes(await self.within(provider.get(instance.id)))

    async def test_one_that_falls_back_to_stopped_has_ended(self) -> None:
        provider = await self.started()
        ended: list[Instance] = []
        provider.watch(ended.append)
        spec = self.spec()
        await self.stopped(provider, spec)
        self.world.boot_seconds = 60.0
        launched = await self.within(provider.launch(self.again(spec)))
        await deferToThread(self.world.ec2.stop_instances, InstanceIds=[launched.id])
        self.world.show_stopped(launched.id)
        await self.assertFailure(self.within(provider.wait_running(launched.id, 20.0)), Unavailable)
        self.assertEqual([each.id for each in ended], [launched.id])
