# SPDX-License-Identifier: Apache-2.0
"""A node whose pods are kept, over fakes. Its files are real, and written at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple, cast

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from infranetes.daemon.node import Node
from infranetes.machines.keeping import Adoption
from infranetes.pods.keeping import clones, states
from infranetes.pods.keeping.clones import Clones
from infranetes.pods.keeping.config import KeptConfig
from infranetes.pods.keeping.keep_as import KeepAsFeature, KeptCollection
from infranetes.pods.keeping.keeper import PodKeeper
from infranetes.pods.keeping.starts import KeptStarts
from infranetes.pods.keeping.states import KeptState, KeptStates
from infranetes.pods.node.hooks import PodFeature
from infranetes.pods.node.inventory import Container, Sandbox
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, NotFound
from infranetes_common.reactors import installed
from infranetes_common.wire import cri, vmserver
from tests.infranetes.pods.fake_agent import FakeAgent, call
from tests.infranetes.pods.fakes import Carried, FakeNode, box, pod
from tests.infranetes.pods.keeping.keeper import Keeper, keeping
from tests.support.failures import FailureAssertions

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

SECRET = "5ec"
reactor = installed()


async def inline(
    reactor: object,
    work: Callable[[*Ts], T],
    *args: *Ts,
    on_cancel: Callable[[], None] | None = None,
    purpose: str = "",
) -> T:
    """Stand in for `run_in_thread`."""
    return work(*args)


class CarriedSecret(Carried):
    """Stands in for `Volumes`, with one secret in each pod.

    :ivar still: the sandboxes that are held still now. :ivar brought: how often each got its secret again.
    :ivar error: why that fails."""

    def __init__(self) -> None:
        self.still: set[str] = set()
        self.brought: list[str] = []
        self.error: Exception | None = None
        self.agents: dict[str, FakeAgent] = {}

    async def volumes_of(self, container: Container) -> dict[str, str]:
        return {
            mount.container_path: f"{mount.host_path} of {container.sandbox.config.metadata.uid}"
            for mount in container.config.mounts
        }

    async def hold_still(self, sandbox: Sandbox) -> list[str]:
        self.still.add(sandbox.id)
        return [SECRET]

    async def go_on(self, sandbox: Sandbox) -> None:
        if self.error is not None:
            raise self.error
        self.still.discard(sandbox.id)
        self.brought.append(sandbox.id)


class CloneAgent(FakeAgent):
    """The agent of a VM that perhaps started from a kept state.

    :ivar kept: the containers that it has from there. :ivar volumes: the ids of volumes that it has.
    :ivar adopt_error: why it can't give them away."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.is_clone = False
        self.kept: set[str] = set()
        self.volumes: set[str] = set()
        self.adopt_error: Exception | None = None

    @call
    async def adopt(
        self, containers: Sequence[Adoption], volumes: Mapping[str, str], sandbox: cri.PodSandboxConfig
    ) -> list[vmserver.ContainerState]:
        self._reach()
        if not self.is_clone:
            raise FailedPrecondition("this VM is not a clone of one that was kept, so nothing is adopted")
        for old, new in volumes.items():
            if old not in self.volumes and new not in self.volumes:
                raise NotFound(f"no volume {old}")
            self.volumes = {*self.volumes - {old}, new}
        if containers and self.adopt_error is not None:
            raise self.adopt_error
        self.adopted.append((list(containers), dict(volumes), sandbox))
        for each in containers:
            if each.old_id not in self.kept:
                raise NotFound(f"no container {each.old_id} was kept in this VM, or it has ended")
            self.kept.discard(each.old_id)
            self.become(each.new_id, cri.CONTAINER_CREATED)
        self.held = bool(self.kept)
        return [self.containers[each.new_id] for each in containers]

    @call
    async def remove(self, id: str, within: float = 30.0) -> None:
        if id in self.kept:
            self._reach()
            self.calls.append(("remove", id))
            self.kept.discard(id)
            self.held = bool(self.kept)
        else:
            await super().remove(id, within)


def keeper_of(node: Node, states: KeptStates) -> PodKeeper:
    """Return a keeper of a node's pods."""
    return PodKeeper(
        node.reactor, node.inventory, node.providers, node.handlers, node.features, states, node.stopping
    )


class KeepingNode(FakeNode):
    """A daemon whose pods are kept. :param directory: of the kept states."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = KeptConfig()
        self.abandoned: list[Deferred[KeptState]] = []
        super().__init__()

    def make_features(self) -> list[PodFeature]:
        features = super().make_features()
        self.states = KeptStates(reactor, self.directory)
        node = self.node
        clock, inventory, handlers = node.reactor, node.inventory, node.handlers
        self.keeper = keeper_of(node, self.states)
        self.clones = Clones(reactor, self.directory / "pods")
        self.starts = KeptStarts(clock, inventory, handlers, node.features, self.states, self.clones)
        at = features.index(self.carried) + 1
        self.keep_as = KeepAsFeature(clock, inventory, node.providers, handlers, self.states, self.keeper)
        self.collection = KeptCollection(clock, self.states, self.config, node.times.launch)
        mine = [self.keeper, self.keep_as, self.collection]
        return [self.starts, *features[:at], *mine, *features[at:]]

    def make_agent(self, sandbox_id: str) -> FakeAgent:
        agent = CloneAgent(sandbox_id, self.scheduler)
        if (kept := self.provider.specs[-1].kept) is not None:
            state = next(each for each in self.states if self.states.files(each.id) == kept)
            agent.kept = {each.id for each in state.containers}
            agent.volumes = {id for each in state.containers for id in each.volumes.values()}
            agent.is_clone = agent.held = True
        return agent

    def kill(self) -> None:
        self.abandoned += self.keeper._working.values()  # a killed daemon ends nothing
        self.keeper._working.clear()
        super().kill()

    def make_carried(self) -> CarriedSecret:
        self.secrets = CarriedSecret()
        return self.secrets


class KeptCase(FailureAssertions, SynchronousTestCase):
    """The pod `web` with a running container, on a node that keeps pods.

    :ivar keeping: the provider's part."""

    keeping: Keeper

    def setUp(self) -> None:
        for module in (states, clones):
            self.patch(module, "run_in_thread", inline)
        self.directory = Path(self.mktemp()).absolute()
        self.world = KeepingNode(self.directory)
        self.keeping = keeping(self.world.provider)
        self.world.provider_ready()
        self.addCleanup(self.end)
        self.pod_id = self.run_pod()
        self.container = self.run_container(self.pod_id)

    def end(self) -> None:
        self.world.kill()
        for work in self.world.abandoned:
            work.addErrback(lambda _: None)
            work.cancel()

    def run_pod(self, **fields: Any) -> str:
        return str(self.successResultOf(start(self.world.sandboxes.run(pod(**fields), ""))))

    def agent_of(self, sandbox: str) -> CloneAgent:
        return cast(CloneAgent, self.world.agents[sandbox])

    def run_container(self, sandbox: str, **fields: Any) -> str:
        made = str(self.successResultOf(start(self.world.containers.create(sandbox, box(**fields)))))
        self.successResultOf(start(self.world.containers.start(made)))
        return made

    @property
    def sandbox(self) -> Sandbox:
        return self.world.node.inventory.sandboxes[self.pod_id]

    @property
    def agent(self) -> FakeAgent:
        return self.world.agents[self.pod_id]

    def keep(self, name: str = "warm", seconds: float = 60.0, **options: Any) -> Deferred[KeptState]:
        return start(self.world.keeper.keep(self.sandbox, name, seconds, **options))

    def kept(self, name: str = "warm", **options: Any) -> KeptState:
        return self.successResultOf(self.keep(name, **options))

    def left(self) -> list[str]:
        """Return what there is of states and marks on the disk."""
        return sorted(
            str(path.relative_to(self.directory))
            for path in self.directory.rglob("*")
            if path.parent != self.directory
        )

    def assert_goes_on(self) -> None:
        """Fail unless the pod is as it was before it was kept, and nothing of a state is left."""
        self.assert_pod_runs()
        self.assertEqual(self.left(), [])
        self.assertEqual(list(self.world.states), [])

    def assert_pod_runs(self) -> None:
        self.assertFalse(self.agent.held)
        self.assertEqual(self.world.secrets.still, set())
        self.assertEqual(self.world.states.held, set())
