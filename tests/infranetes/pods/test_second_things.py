# SPDX-License-Identifier: Apache-2.0
"""What happens second: in each state that a pod, its containers or a VM of the pool pass through, something
else happens, in an unkind world.

A failure's message has the story and its seed, from which `tell` repeats it. With the variable
INFRANETES_TEST_NIGHTLY set there are many more seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from infranetes.machines.pool_record import PoolState
from infranetes.pods.node.inventory import Container, Sandbox
from infranetes.pods.store.states import ContainerState, SandboxState
from infranetes_common.concurrency import start
from infranetes_common.wire import cri
from tests.harness.durations import slow
from tests.harness.needs import repetitions
from tests.infranetes.pods.fakes import box, pod
from tests.infranetes.pods.second_things import OWN, Thing, World

SEEDS = repetitions(1, nightly=60)
MOST_TRIES = 12  # of a client that ends what is left

OURS = pod("web", annotations=OWN, port_mappings=[cri.PortMapping(host_port=8080, container_port=80)])
POOLED = pod("web", port_mappings=[cri.PortMapping(host_port=8080, container_port=80)])


def subjects(world: World) -> list[Sandbox]:
    """Return all pods but the neighbour."""
    return [one for one in world.node.inventory if one.id != world.neighbour]


def containers(world: World) -> list[Container]:
    return [one for sandbox in subjects(world) for one in list(sandbox.containers.values())]


async def live(world: World, config: Any) -> None:
    """Do what kubelet does with a pod, as long as all goes well."""
    call, id = world.call, await world.call("run", world.sandboxes.run(config, ""))
    if id is None:
        return
    made = await call("create", world.containers.create(id, box()))
    if made is None:
        return
    await call("start", world.containers.start(made))
    await call("stop the container", world.containers.stop(made, 1))
    await call("remove the container", world.containers.remove(made))
    await call("stop", world.sandboxes.stop(id))
    await call("remove", world.sandboxes.remove(id))


# ---- second things


def stop(world: World) -> None:
    for one in subjects(world):
        world.call("stop, second", world.sandboxes.stop(one.id))


def remove(world: World) -> None:
    for one in subjects(world):
        world.call("remove, second", world.sandboxes.remove(one.id))


def start_container(world: World) -> None:
    for one in containers(world):
        world.call("start, second", world.containers.start(one.id))


def stop_container(world: World) -> None:
    for one in containers(world):
        world.call("stop the container, second", world.containers.stop(one.id, 1))


def remove_container(world: World) -> None:
    for one in containers(world):
        world.call("remove the container, second", world.containers.remove(one.id))


def exit_container(world: World) -> None:
    """The container ends by itself."""
    for one in containers(world):
        agent = world.agents.get(one.sandbox.id)
        if (
            agent is not None
            and one.id in agent.containers
            and agent.containers[one.id].state == cri.CONTAINER_RUNNING
        ):
            agent.become(one.id, cri.CONTAINER_EXITED, finished_at=9, exit_code=1)


def run_again(world: World) -> None:
    """The client asks for the same pod again, as kubelet does when it has given up."""
    world.give_up()
    config = cri.PodSandboxConfig.FromString(subjects(world)[0].record.config) if subjects(world) else OURS
    world.call("run, again", world.sandboxes.run(config, ""))


def run_next(world: World) -> None:
    """The client asks for the pod's next attempt beside this one, without its host port."""
    world.call("run, next attempt", world.sandboxes.run(pod("web", attempt=1, annotations=OWN), ""))


def give_up(world: World) -> None:
    world.give_up()


def kill(world: World) -> None:
    world.restart()


def stop_daemon(world: World) -> None:
    """The daemon is stopped in order, and started again."""
    world.stop()
    world.restart()


def start_late(world: World) -> None:
    """The daemon is killed, and the next one's provider takes a while to start."""
    world.kill()
    world.begin()
    world.clock.callLater(15.0, world.provider_ready)


def end_vm(world: World) -> None:
    """The VMs end by themselves."""
    for instance in list(world.provider.instances.values()):
        if instance.sandbox_id != world.neighbour:
            world.provider.end(instance.id, "power")


def lose_vm(world: World) -> None:
    """The VMs are gone, and nobody tells."""
    for instance in list(world.provider.instances.values()):
        if instance.sandbox_id != world.neighbour:
            del world.provider.instances[instance.id]
            world.agents[instance.sandbox_id].go_away()


def hang_up(world: World) -> None:
    """The agents lose their connections, and can't be reached for a while."""
    for id, agent in world.agents.items():
        if id != world.neighbour and not agent.away:
            agent.go_away()
            world.clock.callLater(8.0, world.come_back, id)


def sweep(world: World) -> None:
    world.call("sweep", world.reconciler.once(world.node_provider))


def drain(world: World) -> None:
    world.call("drain", world.node.pools.own.drain())


def refill(world: World) -> None:
    world.call("drain", world.node.pools.own.drain())
    world.call("fill", world.node.pools.own.fill())


def twice(thing: Thing) -> Thing:
    def both(world: World) -> None:
        thing(world)
        world.clock.callLater(world.scheduler.random.uniform(0, 2), thing, world)

    both.__name__ = f"{getattr(thing, '__name__', '')} twice"
    return both


def after(first: Thing, second: Thing) -> Thing:
    def both(world: World) -> None:
        first(world)
        world.clock.callLater(world.scheduler.random.uniform(0, 5), second, world)

    both.__name__ = f"{getattr(first, '__name__', '')} then {getattr(second, '__name__', '')}"
    return both


THINGS: tuple[Thing, ...] = (
    stop, twice(stop), remove, twice(remove), after(stop, remove), stop_container, twice(remove_container),
    exit_container, give_up, run_again, run_next, kill, twice(kill), stop_daemon, start_late, end_vm, lose_vm,
    hang_up, sweep, start_container, after(end_vm, kill), after(stop, kill), after(kill, stop),
    after(hang_up, remove),
)  # fmt: skip
POOL_THINGS: tuple[Thing, ...] = (
    stop, twice(remove), give_up, run_next, kill, stop_daemon, start_late, end_vm, lose_vm, hang_up, sweep,
    drain, twice(drain), refill, after(drain, kill), after(kill, drain),
)  # fmt: skip


@slow(6, "it tells some hundred stories")
class SecondThings(SynchronousTestCase):
    """No VM without a record, nobody else's VM is touched, and all are told of each beginning and end."""

    def tell(self, state: Enum, thing: Thing, seed: int, begin: Callable[[int], World], config: Any) -> None:
        """Have a pod live, and the thing happen as it comes to the state; check all that has to be."""
        name = f"{state} {getattr(thing, '__name__', thing)} seed {seed}"
        world, waiting = begin(seed), [True]

        def entered(entered: object) -> None:
            if entered is state and waiting:
                waiting.clear()
                delay = world.scheduler.random.choice([0, 0, 0.3, 2.0])
                world.clock.callLater(delay * world.scheduler.random.random(), happen)

        def happen() -> None:
            world.scheduler.note(f"! {getattr(thing, '__name__', thing)}")
            thing(world)

        world.entered = entered
        start(live(world, config))
        if state in (SandboxState.LAUNCHING, SandboxState.VACANT, PoolState.BOOTING):
            entered(state)
        self.rest(world, name)
        for _ in range(MOST_TRIES):
            world.call("drain, last", world.node.pools.own.drain())
            remove(world)
            self.rest(world, name)
            if not subjects(world) and not world.node.pools.own.members:
                break
        else:
            self.fail_with(world, name, "a pod or the pool never ends")
        left = [one.sandbox_id for one in world.provider.instances.values()]
        if left != [world.neighbour] * bool(world.neighbour):
            self.fail_with(world, name, f"VMs are left: {left}")
        world.kill()

    def rest(self, world: World, name: str) -> None:
        world.come_to_rest()
        wrong = [*world.faults, *world.unrest()]
        errors = [failure.getTraceback() for failure in self.flushLoggedErrors()]
        if wrong or errors:
            self.fail_with(world, name, "; ".join([*wrong, *errors]))

    def fail_with(self, world: World, name: str, why: str) -> None:
        world.kill()
        self.fail(f"{why}\n{name}:\n" + "\n".join(world.scheduler.story))

    def tell_all(
        self, states: list[Enum], things: tuple[Thing, ...], begin: Callable[[int], World], config: Any
    ) -> None:
        for state in states:
            for number, thing in enumerate(things):
                for seed in range(SEEDS):
                    self.tell(state, thing, 1000 * seed + number, begin, config)

    def test_a_pod(self) -> None:
        states: list[Enum] = [one for one in SandboxState if one.value in
                              ("launching", "ready", "stopping", "stopped", "abandoned", "lost")]  # fmt: skip
        self.tell_all(states, THINGS, World, OURS)

    def test_a_container(self) -> None:
        self.tell_all(list(ContainerState), THINGS, World, OURS)

    def test_a_pod_whose_image_is_the_vm(self) -> None:
        states: list[Enum] = [SandboxState.VACANT, SandboxState.BOOTING, SandboxState.READY,
                              SandboxState.STOPPING, ContainerState.REMOVING]  # fmt: skip
        self.tell_all(states, THINGS, lambda seed: World(seed, machines=True), POOLED)

    def test_a_pod_with_a_vm_of_the_pool(self) -> None:
        states: list[Enum] = [PoolState.BOOTING, SandboxState.LAUNCHING, SandboxState.READY,
                              SandboxState.STOPPING]  # fmt: skip
        self.tell_all(states, POOL_THINGS, lambda seed: World(seed, pooled=2), POOLED)
