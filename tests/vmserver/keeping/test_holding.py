# SPDX-License-Identifier: Apache-2.0
"""A pod is held whole or not at all, however far it got, and a clone is never the pod that was kept."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import directlyProvides

from infranetes_common.concurrency import deferred, start
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InfranetesError,
    NotFound,
    Unavailable,
    Unimplemented,
)
from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages
from tests.support.inline_threads import InlineThreads
from vmserver.containers.hooks import Hook
from vmserver.containers.interface import IHoldsContainers
from vmserver.containers.provider_choice import ProviderChoice
from vmserver.keeping import holding as module
from vmserver.keeping import record
from vmserver.keeping.holding import Adoption, Holding, Wanted
from vmserver.keeping.record import State
from vmserver.volumes.parts import VolumeParts
from vmserver.volumes.store import VolumeStore

HOOK = Hook(("sync",), 0, 5.0)
RUNS = messages.ContainerState(id="c1", state=cri.CONTAINER_RUNNING)
ENDED = messages.ContainerState(id="c2", state=cri.CONTAINER_EXITED)


class Machine:
    """A provider, the network and all else of a pod that a clone leaves: what outlives agents.

    :ivar calls: in their order. :ivar failing: the errors of calls, by their names.
    :ivar waiting: what calls wait for, by their names."""

    name = "oci"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing: dict[str, Exception] = {}
        self.waiting: dict[str, Deferred[None]] = {}
        self.frozen = self.silent = self.departed = False
        self.left: list[str] = []

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.waiting:
            await self.waiting[name]
        if name in self.failing:
            raise self.failing[name]

    @deferred
    async def containers(self) -> list[messages.ContainerState]:
        return [RUNS, ENDED]

    @deferred
    async def tell(self, id: str, hook: Hook) -> None:
        await self._call(f"tell {id}")

    @deferred
    async def hold(self) -> list[str]:
        await self._call("hold")
        self.frozen = True
        return ["c1"]

    @deferred
    async def thaw(self) -> None:
        await self._call("thaw")
        self.frozen = False

    def thd_pids(self) -> dict[str, list[int]]:
        return {"c1": [os.getpid()]}

    @deferred
    async def keep(self) -> None:
        await self._call("keep")
        self.left = ["c1"]

    @deferred
    async def adopt(self, old: str, new: str, *_: object) -> messages.ContainerState:
        await self._call(f"adopt {old}")
        self.left.remove(old)
        return messages.ContainerState(id=new, state=cri.CONTAINER_CREATED)

    def kept(self) -> list[str]:
        return self.left

    async def begin(self, port: int) -> None:
        await self._call("silence")
        self.silent = True

    async def end(self) -> None:
        await self._call("speak")
        self.silent = False

    async def check(self) -> None:
        await self._call("check")

    async def leave(self) -> None:
        await self._call("leave")
        self.departed = True


class HoldingCase(SynchronousTestCase):
    """A machine, and an agent on it."""

    def setUp(self) -> None:
        self.fresh()

    def fresh(self) -> None:
        """Have another machine, whose pod runs and has a secret."""
        self.base = Path(tempfile.mkdtemp(prefix="infranetes-holding-"))
        self.addCleanup(shutil.rmtree, self.base)
        self.clock = InlineThreads()
        self.machine = Machine()
        directlyProvides(self.machine, IHoldsContainers)
        self.volumes = VolumeStore(self.base / "disk", self.base / "memory", mount=False)
        self.volumes.make("secret", file=True, in_memory=True)
        self.secret = self.volumes.path("secret")
        self.secret.write_text("tell nobody")
        self.holding = self.agent()

    def agent(self) -> Holding:
        """Return an agent's holding, of the same machine."""
        machine: Any = self.machine
        choice = cast(ProviderChoice, SimpleNamespace(provider=machine))
        parts = VolumeParts(self.volumes, self.base / "parts", mount=False)
        return Holding(
            self.clock.reactor, choice, self.volumes, parts, machine, machine, self.base / record.FILE
        )

    def hold(self, *, keep_secrets: bool = False, seconds: float = 30.0) -> Deferred[list[str]]:
        wanted = Wanted({"c1": HOOK, "c2": HOOK}, {"secret"}, keep_secrets, seconds)
        return start(self.holding.hold(wanted))

    def state(self) -> State:
        """Return the recorded state."""
        return record.thd_load(self.base / record.FILE)

    def runs(self) -> None:
        """Check that the pod runs as if nothing had been."""
        self.assertEqual((self.machine.frozen, self.machine.silent, self.state()), (False, False, State.NONE))
        self.assertFalse(self.holding.held)

    def restarted(self) -> None:
        """Have another agent on the machine."""
        self.machine.calls.clear()
        self.machine.failing.clear()
        self.holding = self.agent()
        self.successResultOf(start(self.holding.restore()))


class HoldTests(HoldingCase):
    """The pod that is kept."""

    def test_it_is_told_silenced_held_and_emptied_in_this_order(self) -> None:
        self.assertEqual(self.successResultOf(self.hold()), ["c1"])
        self.assertEqual(self.machine.calls, ["check", "tell c1", "silence", "hold"])
        self.assertEqual((self.secret.read_text(), self.state()), ("", State.HELD))
        self.assertTrue(self.holding.held and self.holding.leaving)

    def test_once_it_is_held_it_stays_so(self) -> None:
        self.successResultOf(self.hold())
        self.secret.write_text("brought again")
        self.machine.calls.clear()
        self.assertEqual(self.successResultOf(self.hold()), ["c1"])
        self.assertEqual((self.machine.calls, self.secret.read_text()), (["hold"], "brought again"))

    def test_it_goes_on(self) -> None:
        for _ in range(2):
            self.successResultOf(start(self.holding.release()))
        self.assertEqual(self.machine.calls, [])
        self.successResultOf(self.hold())
        for _ in range(2):
            self.successResultOf(start(self.holding.release()))
            self.runs()
        self.assertEqual(self.machine.calls[-2:], ["thaw", "speak"])

    def test_secrets_are_kept_where_the_pod_wants_that(self) -> None:
        with self.secret.open():
            self.successResultOf(self.hold(keep_secrets=True))
        self.assertEqual(self.secret.read_text(), "tell nobody")

    def test_a_secret_that_is_open_is_refused_and_all_goes_on(self) -> None:
        with self.secret.open():
            self.failureResultOf(self.hold(), FailedPrecondition)
        self.runs()
        self.assertEqual(self.secret.read_text(), "tell nobody")

    def test_whatever_fails_nothing_is_held(self) -> None:
        for step in ("check", "tell c1", "silence", "hold"):
            self.fresh()
            self.machine.failing = {step: Unavailable("no")}
            self.failureResultOf(self.hold(), Unavailable)
            self.runs()
            self.assertEqual(self.secret.read_text(), "tell nobody")
        for name in ("secrets.thd_check", "secrets.thd_empty", "os.sync"):
            self.fresh()
            owner, _, function = name.partition(".")
            with self.patched(getattr(module, owner), function, self.refuse):
                self.failureResultOf(self.hold(), Unavailable)
            self.runs()

    def patched(self, owner: object, name: str, value: Callable[..., object]) -> Any:  # Any: a context
        return patch.object(owner, name, value)

    def refuse(self, *_: object) -> None:
        raise Unavailable("no")

    def test_a_full_disk_holds_nothing(self) -> None:
        save = record.thd_save
        for failing in (State.HOLDING, State.HELD):
            self.fresh()

            def refuse(file: Path, state: State, failing: State = failing) -> None:
                if state is failing:
                    raise FailedPrecondition("the disk is full")
                save(file, state)

            with self.patched(module, "thd_save", refuse):
                self.failureResultOf(self.hold(), FailedPrecondition)
            self.runs()

    def test_whenever_it_is_cancelled_nothing_is_held(self) -> None:
        for step in ("check", "tell c1", "silence", "hold"):
            self.fresh()
            self.machine.waiting = {step: Deferred()}
            holding = self.hold()
            holding.addErrback(lambda failure: failure.trap(CancelledError))
            holding.cancel()
            self.successResultOf(holding)
            self.runs()

    def test_cancelled_twice_it_keeps_its_turn_until_all_goes_on(self) -> None:
        self.machine.waiting = {"hold": Deferred(), "thaw": Deferred()}
        holding = self.hold()
        for _ in range(2):
            holding.cancel()
        following = self.hold()
        self.assertEqual(self.machine.calls[-1], "thaw")
        del self.machine.waiting["hold"]
        self.machine.waiting.pop("thaw").callback(None)
        self.failureResultOf(holding, CancelledError)
        self.assertEqual(self.successResultOf(following), ["c1"])
        self.assertEqual((self.machine.frozen, self.machine.silent, self.state()), (True, True, State.HELD))

    def test_a_release_that_is_cancelled_keeps_its_turn_until_all_goes_on(self) -> None:
        self.successResultOf(self.hold())
        self.machine.waiting = {"thaw": Deferred()}
        releasing = start(self.holding.release())
        releasing.cancel()
        following = self.hold()
        self.assertEqual(self.machine.calls[-1], "thaw")
        self.machine.waiting.pop("thaw").callback(None)
        self.successResultOf(releasing)
        self.successResultOf(following)
        self.assertEqual((self.machine.frozen, self.machine.silent, self.state()), (True, True, State.HELD))

    def test_it_takes_no_longer_than_it_may(self) -> None:
        self.machine.waiting = {"tell c1": Deferred()}
        holding = self.hold(seconds=7.0)
        self.clock.advance(6.9)
        self.assertNoResult(holding)
        self.clock.advance(0.2)
        self.failureResultOf(holding, DeadlineExceeded)
        self.runs()

    def test_it_is_released_in_the_midst_of_it(self) -> None:
        for step in ("tell c1", "silence", "hold"):
            self.fresh()
            self.machine.waiting = {step: Deferred()}
            holding = self.hold()
            self.successResultOf(start(self.holding.release()))
            self.failureResultOf(holding, CancelledError)
            self.runs()

    def test_a_release_that_fails_is_made_again(self) -> None:
        for step in ("thaw", "speak"):
            self.fresh()
            self.successResultOf(self.hold())
            self.machine.failing = {step: Unavailable("no")}
            self.failureResultOf(start(self.holding.release()), Unavailable)
            self.assertEqual(self.state(), State.HELD)
            self.machine.failing = {}
            self.successResultOf(start(self.holding.release()))
            self.runs()

    def test_an_agent_that_is_killed_while_it_holds_lets_the_next_one_let_go(self) -> None:
        for step in ("tell c1", "silence", "hold"):
            self.fresh()
            self.machine.waiting = {step: Deferred()}
            self.hold()
            self.machine.frozen = self.machine.silent = True  # perhaps, by now
            self.assertEqual(self.state(), State.HOLDING)
            self.machine.waiting = {}
            self.restarted()
            self.runs()

    def test_another_agent_holds_on_what_was_held(self) -> None:
        self.successResultOf(self.hold())
        self.restarted()
        self.assertEqual(self.machine.calls, ["silence", "hold"])
        self.assertEqual((self.state(), self.holding.held), (State.HELD, True))
        self.successResultOf(start(self.holding.release()))
        self.runs()

    def test_an_agent_that_is_killed_while_it_lets_go_is_followed_by_one_that_holds_on(self) -> None:
        for step in ("thaw", "speak"):
            self.fresh()
            self.successResultOf(self.hold())
            self.machine.waiting = {step: Deferred()}
            start(self.holding.release())
            self.machine.waiting = {}
            self.restarted()
            self.assertTrue(self.machine.frozen and self.machine.silent)

    def test_a_record_that_cant_be_read_stops_no_agent(self) -> None:
        (self.base / record.FILE).write_text("{")
        self.holding = self.agent()
        self.successResultOf(start(self.holding.restore()))
        self.assertEqual(len(self.flushLoggedErrors(InfranetesError)), 0)
        self.successResultOf(self.hold())

    def test_a_provider_that_cant_says_so(self) -> None:
        directlyProvides(self.machine, ())
        for call in (
            self.hold(),
            start(self.holding.release()),
            start(self.holding.adopt([], {}, cri.PodSandboxConfig())),
        ):
            self.assertIn("provider oci", str(self.failureResultOf(call, Unimplemented).value))


class CloneTests(HoldingCase):
    """A clone of it."""

    def leave(self) -> None:
        """Have the machine leave its pod."""
        self.successResultOf(self.hold())
        self.machine.calls.clear()
        self.successResultOf(start(self.holding.leave()))

    def clone(self) -> None:
        """Have the machine be another pod's."""
        self.leave()
        self.successResultOf(start(self.holding.arrive()))

    def adopt(self, old: str = "c1") -> Deferred[list[messages.ContainerState]]:
        adoption = Adoption(old, "n1", cri.ContainerConfig(), None)
        return start(self.holding.adopt([adoption], {"secret": "own"}, cri.PodSandboxConfig()))

    def test_it_is_silent_until_it_has_another_address(self) -> None:
        self.leave()
        self.assertEqual(self.machine.calls, ["keep", "leave"])
        self.assertTrue(self.machine.silent and self.machine.frozen and self.holding.departed)
        self.successResultOf(start(self.holding.arrive()))
        self.assertEqual((self.machine.silent, self.machine.frozen, self.state()), (False, True, State.CLONE))
        self.assertFalse(self.holding.leaving)

    def test_it_can_not_be_let_go_as_the_pod_that_was_kept(self) -> None:
        self.leave()
        for arrived in (False, True):
            if arrived:
                self.successResultOf(start(self.holding.arrive()))
            self.failureResultOf(start(self.holding.release()), FailedPrecondition)
            self.failureResultOf(self.hold(), FailedPrecondition)
        self.assertTrue(self.machine.frozen)

    def test_its_containers_and_volumes_are_adopted(self) -> None:
        self.clone()
        (state,) = self.successResultOf(self.adopt())
        self.assertEqual((state.id, state.state), ("n1", cri.CONTAINER_CREATED))
        self.assertEqual(self.volumes.path("own").read_text(), "")
        self.assertFalse(self.holding.held)
        for _ in range(2):
            self.successResultOf(start(self.holding.release()))

    def test_what_fails_may_be_adopted_again(self) -> None:
        self.clone()
        self.machine.failing = {"adopt c1": NotFound("no")}
        self.failureResultOf(self.adopt(), NotFound)
        self.machine.failing = {}
        self.successResultOf(self.adopt())

    def test_an_adoption_that_is_cancelled_goes_on_in_its_turn(self) -> None:
        self.clone()
        self.machine.waiting = {"adopt c1": Deferred()}
        adopting = self.adopt()
        adopting.cancel()
        self.failureResultOf(adopting, CancelledError)
        following = start(self.holding.release())
        self.assertNoResult(following)
        self.machine.waiting["adopt c1"].callback(None)
        self.successResultOf(following)
        self.assertEqual(self.machine.left, [])

    def test_it_can_be_kept_itself_once_all_is_adopted(self) -> None:
        self.clone()
        self.failureResultOf(self.hold(), FailedPrecondition)
        self.machine.left = []
        self.assertEqual(self.successResultOf(self.hold()), ["c1"])
        self.successResultOf(start(self.holding.release()))
        self.runs()

    def test_nothing_is_adopted_in_the_pod_itself(self) -> None:
        for held in (False, True):
            if held:
                self.successResultOf(self.hold())
            self.failureResultOf(self.adopt(), FailedPrecondition)

    def test_an_agent_that_is_killed_while_it_leaves_is_followed_by_one_that_goes_on_leaving(self) -> None:
        for step in ("keep", "leave"):
            self.fresh()
            self.successResultOf(self.hold())
            self.machine.waiting = {step: Deferred()}
            start(self.holding.leave())
            self.machine.waiting = {}
            self.restarted()
            self.assertEqual(self.machine.calls, ["silence", "keep", "leave"])
            self.assertTrue(self.machine.departed and self.holding.departed)

    def test_in_a_clone_another_agent_has_nothing_to_do(self) -> None:
        self.clone()
        self.restarted()
        self.assertEqual((self.machine.calls, self.holding.held), ([], True))
        self.successResultOf(self.adopt())

    def test_one_that_can_not_leave_is_nobodys(self) -> None:
        self.successResultOf(self.hold())
        self.machine.failing = {"leave": Unavailable("no")}
        self.failureResultOf(start(self.holding.leave()), Unavailable)
        self.assertTrue(self.holding.departed and self.machine.silent and self.machine.frozen)
        self.machine.failing = {}
        self.successResultOf(start(self.holding.leave()))

    def test_who_has_left_nothing_does_not_arrive(self) -> None:
        self.successResultOf(start(self.holding.arrive()))
        self.assertEqual(self.machine.calls, [])
        self.runs()
