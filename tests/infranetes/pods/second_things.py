# SPDX-License-Identifier: Apache-2.0
"""A node in an unkind world, and what must be true of it while and after anything happens to it.

`World` is a `FakeNode` whose collaborators remember for whom they have begun something and not ended it.
`World.faults` says what was true at some moment and never may be; `World.unrest` what is not as it has to be
when everything has come to rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.python.failure import Failure
from zope.interface import implementer

from infranetes.machines.interface import IAgent
from infranetes.machines.pool_config import PoolConfig, PoolSize
from infranetes.machines.pool_record import PoolState
from infranetes.pods.features.host_ports import ports_in_force
from infranetes.pods.features.network_policies import FirewallEnforcer, PodFirewalls
from infranetes.pods.node.hooks import PodFeature
from infranetes.pods.node.inventory import Container, Sandbox
from infranetes.pods.store.states import ALIVE, ContainerState, SandboxState
from infranetes.policies.interface import LocalPod
from infranetes.providers.interface import IBoundsStarts, Instance, InstanceSpec
from infranetes_common.concurrency import Coro, start
from infranetes_common.errors import InfranetesError
from infranetes_common.pod_firewall import CLOSED, PodFirewall
from infranetes_common.wire import cri
from tests.infranetes.pods.fake_agent import FakeAgent, FakeStream
from tests.infranetes.pods.fake_images import FakeImages, image
from tests.infranetes.pods.fake_provider import FakeProvider
from tests.infranetes.pods.fake_services import FakeSender, FakeServices
from tests.infranetes.pods.fakes import Carried, FakeLogs, FakeNode, box, pod
from tests.infranetes.pods.scheduling import LAG, LATE, Scheduler

SWEEP, DESERTION, LAUNCH, DESTROY = 15.0, 20.0, 100.0, 30.0
REST = LATE + LAG + 2 * SWEEP + DESERTION  # seconds without a call after which all has come to rest
LIMIT = 3000.0  # seconds within which each call is answered
WITHOUT_VM = (SandboxState.LOST, SandboxState.STOPPED, SandboxState.VACANT)
ENDING = (SandboxState.ABANDONED, SandboxState.STOPPING, SandboxState.BOOTING)


class Logs(FakeLogs):
    """Remember whose logs are being written."""

    def __init__(self) -> None:
        super().__init__()
        self.open: set[str] = set()

    def ensure(self, container: Container) -> None:
        if container.state is not ContainerState.EXITED:
            self.open.add(container.id)

    def drain(self, container: Container) -> Deferred[None]:
        self.open.discard(container.id)
        return super().drain(container)

    def abort(self, container: Container, why: str) -> bool:
        self.open.discard(container.id)
        return super().abort(container, why)


class CarriedVolumes(Carried):
    """Remember whose mounts are carried."""

    def __init__(self) -> None:
        self.open: set[str] = set()

    async def prepare(self, container: Container, config: cri.ContainerConfig) -> cri.ContainerConfig:
        self.open.add(container.id)
        return config

    async def release(self, container: Container) -> None:
        self.open.discard(container.id)

    def disconnected(self, sandbox: Sandbox) -> None:
        self.open -= sandbox.containers.keys()


class AttachedVolumes(PodFeature):
    """Remember which sandboxes' disks are attached; stands in for PodVolumes."""

    name = "volumes"

    def __init__(self, world: World) -> None:
        self._world = world
        self.open: set[str] = set()

    def connected(self, sandbox: Sandbox) -> None:
        if sandbox.state in (SandboxState.LAUNCHING, SandboxState.BOOTING):
            self.open.add(sandbox.id)

    async def answered(self, sandbox: Sandbox) -> None:
        self._world.check(sandbox.id in self.open, f"the disks of {sandbox.id[:6]} are mounted, not attached")

    async def vm_destroyed(self, sandbox: Sandbox) -> None:
        alive = [one for one in self._world.provider.instances.values() if one.sandbox_id == sandbox.id]
        attached = bool(alive) and sandbox.id in self.open
        self._world.check(not attached, f"the disks of {sandbox.id[:6]} are freed while its VM runs")
        self.open.discard(sandbox.id)

    async def sweep(self) -> None:
        known = self._world.node.inventory.sandboxes
        self.open = {id for id in self.open if id in known and known[id].state not in WITHOUT_VM}


class Services(FakeServices):
    """Services of which each VM is told at once."""

    def sender(self, agent: IAgent) -> FakeSender:
        sender = super().sender(agent)
        sender.told.succeed(None)
        return sender


class Policies:
    """NetworkPolicies that let nothing in. :ivar pods: those whose firewalls are kept."""

    trouble = ""

    def __init__(self, world: World) -> None:
        self._world = world
        self.pods: set[str] = set()

    def subscribe(self, changed: Callable[[frozenset[str]], None]) -> None:
        pass

    def add(self, pod: LocalPod) -> None:
        self._world.check(pod.id not in self.pods, f"the policies of {pod.id[:6]} are kept twice")
        self.pods.add(pod.id)

    def remove(self, id: str) -> None:
        self._world.check(id in self.pods, f"the policies of {id[:6]} are forgotten twice")
        self.pods.discard(id)

    def firewall(self, id: str) -> PodFirewall | None:
        return CLOSED


class Agent(FakeAgent):
    """An agent that runs each container once, and ends with its VM."""

    def __init__(self, sandbox_id: str, world: World) -> None:
        super().__init__(sandbox_id, world.scheduler)
        self._world = world
        self.runs: Counter[str] = Counter()

    async def start(self, id: str) -> Any:
        if self.containers.get(id) is not None and self.containers[id].state == cri.CONTAINER_CREATED:
            self.runs[id] += 1
            self._world.check(self.runs[id] == 1, f"container {id[:6]} is run again")
        return await super().start(id)

    def watch(self) -> FakeStream:
        self._world.check(not self.streams, f"the agent of {self.sandbox_id[:6]} is watched twice")
        return super().watch()


@implementer(IBoundsStarts)
class Provider(FakeProvider):
    """A provider that starts one pod at a time, and looks at what else is true when it destroys a VM."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._node = world

    def starts_at_once(self) -> int:
        return 1

    async def _launch(self, spec: InstanceSpec) -> Instance:
        made = await super()._launch(spec)
        contents = self._node.store.contents()
        tokens = {one.token for one in contents.sandboxes} | {one.token for one in contents.pool}
        self._node.check(
            spec.token in tokens or self._node.scheduler.late, f"{made.id} is made, and has no record"
        )
        return made

    async def _destroy(self, instance_id: str) -> None:
        instance = self.instances.get(instance_id)
        if instance is not None:
            self._node.check_destruction(instance)
        await super()._destroy(instance_id)
        if instance is not None:
            self._node.agents[instance.sandbox_id].go_away()

    def end(self, instance_id: str, detail: str) -> None:
        self._node.agents[self.instances[instance_id].sandbox_id].go_away()
        super().end(instance_id, detail)


class FakeMachineImages(FakeImages):
    """The only image is a machine."""

    image = image(machine="machine-1")
    machine_images = True


class World(FakeNode):
    """A node with a neighbour, a pod that nobody touches.

    :param pooled: how many VMs its pool is to have. :param machines: its images are machines.
    :ivar faults: what was true and never may be.
    :ivar calls: what the present daemon was asked, with whether the client has given up.
    """

    scheduler: Scheduler
    logs: Logs
    provider: Provider

    def __init__(self, seed: int, pooled: int = 0, machines: bool = False) -> None:
        self.faults: list[str] = []
        self.calls: list[tuple[str, Deferred[Any]]] = []
        self.machines = machines
        self.entered: Callable[[object], None] = lambda state: None
        self.filled = pooled
        pool = PoolConfig(sizes=(PoolSize(count=pooled),), per_minute=1000, parallel=8, retry=1.0)
        super().__init__(
            pool, Scheduler(seed), sweep=SWEEP, desertion=DESERTION, launch=LAUNCH, destroy=DESTROY
        )
        self.scheduler.kind = True
        self.neighbour = ""
        if not machines:
            self.provider_ready()
            self.neighbour = self.now(self.sandboxes.run(pod("neighbour", annotations=OWN), ""))
            self.now(self.containers.start(self.now(self.containers.create(self.neighbour, box()))))
            self.restart()
        else:
            self.provider_ready()
        self.scheduler.kind = False

    def now(self, work: Coro[Any]) -> Any:
        """Return the result of work that has one at once, as the world is kind."""
        results: list[object] = []
        start(work).addBoth(results.append)
        (result,) = results
        if isinstance(result, Failure):
            result.raiseException()
        return result

    # ---- what the daemons are made of

    def make_provider(self) -> FakeProvider:
        return Provider(self)

    def make_agent(self, sandbox_id: str) -> FakeAgent:
        return Agent(sandbox_id, self)

    def make_images(self) -> FakeImages:
        return FakeMachineImages() if self.machines else FakeImages()

    def make_logs(self) -> FakeLogs:
        return Logs()

    def make_carried(self) -> Carried:
        self.mounts = CarriedVolumes()
        return self.mounts

    def make_features(self) -> list[PodFeature]:
        node = self.node
        self.attached = AttachedVolumes(self)
        self.policies = Policies(self)
        enforcer = FirewallEnforcer(node.providers.of)
        firewalls = PodFirewalls(node.reactor, self.policies, enforcer, node.providers.started)
        shadows, *others = super().make_features()
        return [shadows, self.attached, firewalls, *others]

    def made(self) -> None:
        node = self.node
        events = node.inventory.events
        sandbox_changed, container_changed = events.sandbox_changed, events.container_changed

        def sandbox_told(sandbox: Sandbox, before: SandboxState, after: SandboxState) -> None:
            sandbox_changed(sandbox, before, after)
            attached = after is SandboxState.STOPPED and sandbox.id in self.attached.open
            self.check(not attached, f"{sandbox.id[:6]} is stopped, and has disks")
            self.entered(after)

        def container_told(container: Container, before: ContainerState, after: ContainerState) -> None:
            container_changed(container, before, after)
            self.entered(after)

        events.sandbox_changed = sandbox_told  # type: ignore[method-assign]
        events.container_changed = container_told  # type: ignore[method-assign]

    def begin(self) -> None:
        self.services = self.told = Services()
        super().begin()
        for sandbox in self.node.inventory:  # what PodVolumes.load and Volumes.load know from the store
            if sandbox.record.instance_id and sandbox.state is not SandboxState.STOPPED:
                self.attached.open.add(sandbox.id)
            if sandbox.state is SandboxState.READY:
                self.mounts.open |= sandbox.containers.keys()

    def kill(self) -> None:
        super().kill()
        self.calls.clear()

    # ---- what may never be

    def check(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.scheduler.note(f"FAULT: {otherwise}")
            self.faults.append(otherwise)

    def check_destruction(self, instance: Any) -> None:
        """Check that a VM that is destroyed now is one that is being ended, and leads nowhere any more."""
        words = f"{instance.id} is destroyed"
        self.check(instance.sandbox_id != self.neighbour, f"{words}: it is the neighbour's")
        untold = {  # of VMs that are gone without a word; others may have their addresses by now
            one.record.address
            for one in self.node.inventory
            if one.state is SandboxState.READY and one.record.instance_id not in self.provider.instances
        }
        leading = set(self.table.ports.values()) - untold
        self.check(instance.address not in leading, f"{words}: host ports lead to it")
        if self.node.stopping.happened:
            return
        sandbox = self.node.inventory.by_token(instance.token)
        if sandbox is not None:
            going = {ContainerState.CREATING, ContainerState.REMOVING}
            removed = {one.state for one in sandbox.containers.values()} <= going
            vacated = sandbox.record.image and removed  # the VM is its container, or was to be
            self.check(sandbox.state in ENDING or bool(vacated), f"{words}: its pod is {sandbox.state.value}")
        for member in self.node.pools.own.members.values():
            if member.record.token == instance.token:
                self.check(member.state is PoolState.ENDING, f"{words}: it is {member.state.value}")

    # ---- calls

    def call(self, words: str, work: Coro[Any]) -> Deferred[Any]:
        """Ask the daemon for something. An InfranetesError is an answer, any other error is a fault."""
        self.scheduler.note(f"> {words}")
        node, asked = self.node, start(work)
        self.calls.append((words, asked))

        def answered(result: Any) -> Any:
            self.scheduler.note(f"< {words}: {result.value if isinstance(result, Failure) else result}")
            if isinstance(result, Failure):
                given_up = result.check(CancelledError) and (asked in self.given_up or node.stopping.happened)
                known = result.check(InfranetesError) or given_up
                self.check(bool(known), f"{words}: {result.getErrorMessage()} {result.type.__name__}")
                return None
            return result

        return asked.addBoth(answered)

    given_up: tuple[Deferred[object], ...] = ()

    def give_up(self) -> None:
        """Have the clients give up all calls that are not answered."""
        for words, asked in list(self.calls):
            if not asked.called:
                self.scheduler.note(f"x {words}")
                self.given_up = (*self.given_up, asked)
                asked.cancel()

    def come_back(self, id: str) -> None:
        """Let the agent be reached again, if its VM still runs."""
        if any(one.sandbox_id == id for one in self.provider.instances.values()):
            self.agents[id].away = False

    # ---- time

    def advance(self) -> None:
        """Go to the next moment in which something happens."""
        calls = self.clock.getDelayedCalls()
        soonest = min((one.getTime() for one in calls), default=self.clock.seconds() + SWEEP)
        self.clock.advance(max(0.0, soonest - self.clock.seconds()))

    def come_to_rest(self) -> None:
        """Let time pass until all calls are answered, and then until nothing more happens."""
        until = self.clock.seconds() + LIMIT
        while not all(asked.called for _, asked in self.calls):
            if self.clock.seconds() > until:
                self.check(
                    False, f"never answered: {[words for words, asked in self.calls if not asked.called]}"
                )
                return
            self.advance()
        self.calls.clear()
        until = self.clock.seconds() + REST
        while self.clock.seconds() < until or (self._boots() and self.clock.seconds() < until + LAUNCH):
            self.advance()

    def _boots(self) -> bool:
        return self.scheduler.writing or any(
            one.state is PoolState.BOOTING for one in self.node.pools.own.members.values()
        )

    # ---- what has to be when nothing happens any more

    def unrest(self) -> Iterator[str]:
        """Yield what is not as it has to be."""
        node, contents = self.node, self.store.contents()
        recorded = {one.id: one for one in contents.sandboxes}
        for sandbox in node.inventory:
            words = f"sandbox {sandbox.id[:6]}, {sandbox.state.value},"
            if recorded.pop(sandbox.id, None) != sandbox.record:
                yield f"{words} is recorded differently"
            yield from self._unrest_of(sandbox, words)
        for id in recorded:
            yield f"sandbox {id[:6]} has a record, and nothing else"
        kept = {one.id: one for one in contents.containers}
        if kept != {one.id: one.record for one in node.inventory.containers.values()}:
            yield "containers are recorded differently"
        pool = {one.id: one.record for one in node.pools.own.members.values()}
        if pool != {one.id: one for one in contents.pool}:
            yield "the pool is recorded differently"
        if {one.state for one in pool.values()} - {PoolState.IDLE}:
            yield f"the pool has {[one.state.value for one in pool.values()]}"
        if len(pool) != (0 if node.pools.own.drained else self.filled):
            yield f"the pool has {len(pool)} VMs"
        if (starts := self.node_provider.starts).under_way or starts.waiting:
            yield f"{starts.under_way} pods start, and {starts.waiting} wait"
        with_vm = [one for one in node.inventory if one.state is SandboxState.READY]
        free = [one.record.token for one in node.inventory
                if one.state is SandboxState.LOST or _waits(one)]  # fmt: skip
        wanted = [one.record.token for one in with_vm] + [one.token for one in pool.values()]
        found = [one.token for one in self.provider.instances.values() if one.token not in free]
        if sorted(found) != sorted(wanted):
            yield f"{len(found)} VMs, {len(wanted)} of them wanted"
        ids = {one.id for one in with_vm}
        running = sum(one.started - one.stopped for one in self.told.senders)
        if running != len(wanted):
            yield f"{running} VMs of {len(wanted)} are told of Services"
        if {(one.started, one.stopped) for one in self.told.senders} - {(1, 0), (1, 1)}:
            yield "a VM is told twice of Services"
        if self.policies.pods != ids:
            yield "policies are kept for others than the pods that are ready"
        if self.attached.open - {one.id for one in node.inventory if _waits(one)} != ids:
            yield "disks are attached for others than the pods that are ready"
        forwarded = {port: one.address for one in ports_in_force(node.inventory) for port in one.ports}
        if self.table.ports != forwarded:
            yield f"host ports {self.table.ports}, not {forwarded}"
        if stray := {id for id in self.logs.open if id not in node.inventory.containers}:
            yield f"logs are written of {len(stray)} containers that are no more"
        if not self.mounts.open <= set(node.inventory.containers):
            yield "mounts are carried for containers that are no more"
        for id, agent in self.agents.items():
            pooled = id in pool
            if len(agent.streams) != (id in ids and not agent.away) and not pooled:
                yield f"the agent of {id[:6]} has {len(agent.streams)} streams"
            if id not in ids:
                continue
            known = node.inventory.sandboxes[id].containers
            if (
                known.keys()
                - agent.containers.keys()
                - {one.id for one in known.values() if one.state is ContainerState.EXITED}
            ):
                yield f"the VM of {id[:6]} lacks containers that are recorded"
            if any(
                one.state != cri.CONTAINER_CREATED for one in agent.containers.values() if one.id not in known
            ):
                yield f"the VM of {id[:6]} runs a container that is not recorded"

    def _unrest_of(self, sandbox: Sandbox, words: str) -> Iterator[str]:
        if _waits(sandbox):
            return
        if sandbox.state in (*ENDING, SandboxState.LAUNCHING):
            yield f"{words} does not go on"
        for container in sandbox.containers.values():
            state = container.state
            waits = container.removing is not None and container.removing.done  # likewise
            if state is ContainerState.CREATING or (state is ContainerState.REMOVING and not waits):
                yield f"{words} has a container that is {state.value}"
            if sandbox.state is not SandboxState.READY and state in ALIVE:
                yield f"{words} has a container that is {state.value}"
            if container.being_created or container.starting is not None or container.stops:
                yield f"{words} has a container with a call under way"
            if state is ContainerState.EXITED and container.id in self.logs.open:
                yield f"{words} has a log that is written on after its container's end"
        if sandbox.id == self.neighbour:
            (container,) = sandbox.containers.values()
            agent = self.agents[self.neighbour]
            if sandbox.state is not SandboxState.READY or container.state is not ContainerState.RUNNING:
                yield f"{words}, the neighbour, was touched"
            if any(call.startswith("stop") or call == "remove" for call, _ in agent.calls):
                yield f"the neighbour's agent was asked for {agent.calls}"


def _waits(sandbox: Sandbox) -> bool:
    """Whether its stop has failed, and its client has to ask again."""
    failed = sandbox.stopping is not None and sandbox.stopping.done
    return failed and sandbox.state is SandboxState.STOPPING


OWN = {"infranetes.io/size": "x"}  # the annotation of a pod that does not take a VM of the pool

Thing = Callable[[World], object]
"""Something that happens in a world."""
