# SPDX-License-Identifier: Apache-2.0
"""The calls of ``proto/control.proto`` about kept states, from which pods start."""

from __future__ import annotations

from infranetes.control.visits import vm_of
from infranetes.pods.keeping.keeper import PodKeeper
from infranetes.pods.keeping.states import KeptState, KeptStates
from infranetes.pods.node.inventory import Inventory
from infranetes.pods.node.meant import present_sandbox
from infranetes.providers.annotations import kept_name
from infranetes_common.concurrency import shielded
from infranetes_common.errors import InvalidArgument, NotFound
from infranetes_common.reactors import IReactor
from infranetes_common.wire import control
from infranetes_common.wire.control_rpcs import ControlKeptRpcs
from txgrpc import Call

SECONDS = 600.0  # the most that keeping a pod may take
_NANOS = 10**9


class KeptCalls(ControlKeptRpcs):
    """One method per RPC."""

    def __init__(self, clock: IReactor, inventory: Inventory, states: KeptStates, keeper: PodKeeper) -> None:
        self._clock = clock
        self._inventory = inventory
        self._states = states
        self._keeper = keeper

    async def KeepPod(self, request: control.KeepPodRequest, call: Call) -> control.KeepPodResponse:
        name = kept_name("name", request.name)
        sandbox = present_sandbox(self._inventory, request.pod)
        vm, began, limit = vm_of(sandbox), self._clock.seconds(), call.time_remaining()
        seconds = SECONDS if limit is None else min(SECONDS, limit)
        state = await self._keeper.keep(sandbox, name, seconds, replace=request.replace)
        taken = self._clock.seconds() - began
        return control.KeepPodResponse(vm=vm, state=self._message(state), seconds=taken)

    async def ListKept(self, request: control.ListKeptRequest, call: Call) -> control.ListKeptResponse:
        return control.ListKeptResponse(states=map(self._message, self._states))

    async def RemoveKept(self, request: control.RemoveKeptRequest, call: Call) -> control.RemoveKeptResponse:
        meant = {state.id: state for name in request.names for state in self._meant(name)}
        for state in meant.values():
            await shielded(self._states.remove(state.id))
        return control.RemoveKeptResponse(removed=map(self._message, meant.values()))

    def _meant(self, name_or_id: str) -> list[KeptState]:
        """Return the states that a name means. :raise InfranetesError: there are none, or several."""
        namespace, has_namespace, name = name_or_id.rpartition("/")
        if not has_namespace:
            namespaces = sorted({state.namespace for state in self._states if state.name == name})
            if not namespaces:
                raise NotFound(f"there is no kept state {name[:80]!r}: `infranetes-ctl kept` lists them")
            if len(namespaces) > 1:
                raise InvalidArgument(
                    f"the namespaces {', '.join(namespaces)} have kept states {name}: say NAMESPACE/{name}"
                )
            namespace = namespaces[0]
        return self._states.find_to_remove(namespace, name)

    def _message(self, state: KeptState) -> control.KeptState:
        return control.KeptState(
            id=state.id,
            namespace=state.namespace,
            name=state.name,
            stage=state.stage.value,
            pod=state.pod,
            template=state.template,
            provider=state.provider,
            kept_at=int(state.kept_at * _NANOS),
            used_at=int(self._states.used_at(state) * _NANOS),
            pause_seconds=state.pause_seconds,
            size=state.size,
            secrets=state.secrets,
            containers=[
                control.KeptContainer(name=container.name, image=container.image)
                for container in state.containers
            ],
            machine=state.machine,
        )
