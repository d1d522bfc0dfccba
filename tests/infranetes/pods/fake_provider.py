# SPDX-License-Identifier: Apache-2.0
"""A provider whose VMs are entries of a dict."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Protocol, TypeVar

import attrs
from twisted.internet.defer import Deferred, succeed

from infranetes.providers.interface import Instance, InstanceSpec, InstanceState
from infranetes_common.concurrency import start
from infranetes_common.errors import NotFound
from tests.infranetes.pods.fake_agent import FakeAgent
from tests.infranetes.pods.fake_images import IMAGE
from tests.infranetes.pods.scheduling import Kind, Work

T = TypeVar("T")


class World(Protocol):
    """What a provider's VMs are part of, such as a `FakeNode`."""

    agents: dict[str, FakeAgent]

    @property
    def scheduler(self) -> Kind: ...

    def make_agent(self, sandbox_id: str) -> FakeAgent: ...


class FakeProvider:
    """VMs that run at once, unless a test says otherwise.

    :ivar launching: a Deferred for which `launch` waits first. :ivar booting: the same for `wait_running`.
    :ivar calls: the calls, in order.
    """

    name = "fake"

    def __init__(self, world: World) -> None:
        self._world = world
        self.instances: dict[str, Instance] = {}
        self.calls: list[tuple[str, str]] = []
        self.specs: list[InstanceSpec] = []
        self.launching: Deferred[None] | None = None
        self.booting: Deferred[None] | None = None
        self.destroy_error: Exception | None = None
        self.launch_error: Exception | None = None
        self.networks: list[str] = []
        self.more_addresses: tuple[str, ...] = ()
        self.ended: Callable[[Instance], None] = lambda _: None

    def launch(self, spec: InstanceSpec) -> Deferred[Instance]:
        self.calls.append(("launch", spec.token))
        self.specs.append(spec)
        return self._ask(f"launch {spec.sandbox_id[:6]}", lambda: self._launch(spec))

    async def _launch(self, spec: InstanceSpec) -> Instance:
        if self.launching is not None:
            await self.launching
        if self.launch_error is not None:
            raise self.launch_error
        for instance in self.instances.values():
            if instance.token == spec.token:
                return instance
        made = Instance(
            id=f"vm-{spec.token[:6]}",
            token=spec.token,
            sandbox_id=spec.sandbox_id,
            state=InstanceState.RUNNING,
            address=self._free_address(),
            more_addresses=self.more_addresses,
            agent_port=2475,
        )
        self.instances[made.id] = made
        self._world.agents[spec.sandbox_id] = self._world.make_agent(spec.sandbox_id)
        if spec.request.image:
            self._world.agents[spec.sandbox_id].loaded.add(IMAGE)
        return made

    def _ask(self, name: str, work: Work[T]) -> Deferred[T]:
        return start(self._world.scheduler.ask_provider(name, work))

    def _free_address(self) -> str:
        """Return the lowest address that no VM has: those of destroyed VMs are used again."""
        used = {instance.address for instance in self.instances.values()}
        return next(one for number in count(1) if (one := f"10.0.0.{number}") not in used)

    def wait_running(self, instance_id: str, timeout: float) -> Deferred[Instance]:
        return self._ask(f"wait_running {instance_id}", lambda: self._wait(instance_id))

    async def _wait(self, instance_id: str) -> Instance:
        if self.booting is not None:
            await self.booting
        return await self._get(instance_id)

    def get(self, instance_id: str) -> Deferred[Instance]:
        return self._ask(f"get {instance_id}", lambda: self._get(instance_id))

    async def _get(self, instance_id: str) -> Instance:
        if instance_id not in self.instances:
            raise NotFound(f"no VM {instance_id}")
        return self.instances[instance_id]

    async def _list(self) -> list[Instance]:
        return self._world.scheduler.listed(self.instances)

    def list(self) -> Deferred[list[Instance]]:
        return self._ask("list", self._list)

    def destroy(self, instance_id: str) -> Deferred[None]:
        self.calls.append(("destroy", instance_id))
        return self._ask(f"destroy {instance_id}", lambda: self._destroy(instance_id))

    async def _destroy(self, instance_id: str) -> None:
        if self.destroy_error is not None:
            raise self.destroy_error
        self.instances.pop(instance_id, None)

    def configure_network(self, pod_cidr: str) -> Deferred[None]:
        self.networks.append(pod_cidr)
        return succeed(None)

    def status(self) -> dict[str, str]:
        return {"vms": str(len(self.instances))}

    def end(self, instance_id: str, detail: str) -> None:
        """End a VM by itself."""
        ended = attrs.evolve(self.instances[instance_id], state=InstanceState.ENDED, detail=detail)
        self.instances[instance_id] = ended
        self.ended(ended)
