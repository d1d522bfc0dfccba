# SPDX-License-Identifier: Apache-2.0
"""The calls of ``proto/control.proto`` by which pods sleep, and are woken."""

from __future__ import annotations

from infranetes.control.visits import vm_of
from infranetes.pods.node.inventory import Inventory
from infranetes.pods.node.meant import present_sandbox
from infranetes.pods.sleeping.sleep import PodSleep
from infranetes_common.reactors import IReactor
from infranetes_common.wire import control
from infranetes_common.wire.control_rpcs import ControlSleepRpcs
from txgrpc import Call


class SleepCalls(ControlSleepRpcs):
    """One method per RPC."""

    def __init__(self, clock: IReactor, inventory: Inventory, sleeping: PodSleep) -> None:
        self._clock = clock
        self._inventory = inventory
        self._sleeping = sleeping

    async def SleepPod(self, request: control.SleepPodRequest, call: Call) -> control.SleepPodResponse:
        sandbox, began = present_sandbox(self._inventory, request.pod), self._clock.seconds()
        vm, slept = vm_of(sandbox), await self._sleeping.sleep(sandbox)
        return control.SleepPodResponse(vm=vm, size=slept.size, seconds=self._clock.seconds() - began)

    async def WakePod(self, request: control.WakePodRequest, call: Call) -> control.WakePodResponse:
        sandbox, began = present_sandbox(self._inventory, request.pod), self._clock.seconds()
        vm, slept = vm_of(sandbox), sandbox.asleep is not None
        await self._sleeping.wake(sandbox, "infranetes-ctl asks for it")
        return control.WakePodResponse(vm=vm, slept=slept, seconds=self._clock.seconds() - began)
