# SPDX-License-Identifier: Apache-2.0
"""A VM is brought up and torn down, whether it belongs to a pod or to the pool."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred, fail, succeed
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.logger import capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import alsoProvides, implementer

from infranetes.machines.agent.client import RECONNECT, AgentClient
from infranetes.machines.context import VmFacts
from infranetes.machines.pod_machine import INFO_SECONDS, LONGEST_PAUSE, MARGIN_SECONDS, BroughtUp, PodMachine
from infranetes.observer import LaunchStep
from infranetes.providers.interface import (
    InstanceState,
    IPinsVms,
    IPlacesVms,
    IReachesAgents,
    Size,
    VmRequest,
)
from infranetes_common.concurrency import Flight, sleep, start
from infranetes_common.errors import DeadlineExceeded, FailedPrecondition, ResourceExhausted, Unavailable
from infranetes_common.wire import cri
from tests.infranetes.pods.fake_agent import FakeAgent
from tests.infranetes.pods.fake_services import FakeNodeServices, FakeServices
from tests.infranetes.pods.fakes import FakeNode
from txgrpc import Channel

ID, TOKEN = "1d" * 16, "70" * 16


class Killed(BaseException):
    """Raised where the daemon is killed."""


class Owner:
    """An owner that keeps facts in memory and on a simulated disk.

    :ivar written: every write, in order. :ivar last: the daemon is killed after this many.
    """

    def __init__(self, disk: VmFacts, last: int = 99) -> None:
        self.facts = disk
        self.disk = disk
        self.written: list[VmFacts] = []
        self.last = last

    def note(self, facts: VmFacts) -> None:
        self.facts = facts

    def write(self, facts: VmFacts) -> Deferred[None]:
        self.facts = self.disk = facts
        self.written.append(facts)
        if len(self.written) >= self.last:
            raise Killed
        return succeed(None)


class MachineCase(SynchronousTestCase):
    """One VM."""

    def setUp(self) -> None:
        self.world = FakeNode(launch=100.0, destroy=30.0)
        self.addCleanup(self.world.kill)
        self.provider = self.world.provider
        self.world.node_provider.trouble = ""
        self.owner = Owner(VmFacts(ID, TOKEN))
        self.machine = PodMachine(self.world.node_provider, self.owner)

    def up(self, machine: PodMachine | None = None) -> Deferred[BroughtUp]:
        deadline = self.world.clock.seconds() + 100.0
        return start((machine or self.machine).bring_up(VmRequest(Size(1000)), deadline))

    def down(self) -> Deferred[None]:
        return start(self.machine.tear_down())

    @property
    def calls(self) -> list[str]:
        return [call for call, _ in self.provider.calls]


class BringUpTests(MachineCase):
    """From nothing to an agent that answers."""

    def test_each_fact_is_written_before_the_next_step(self) -> None:
        launching: Deferred[None] = Deferred()
        booting: Deferred[None] = Deferred()
        self.provider.launching, self.provider.booting = launching, booting
        came_up = self.up()
        self.assertEqual((self.calls, self.owner.written), (["launch"], []))
        self.assertTrue(self.owner.facts.certificate_key, "noted before the provider is asked")
        self.provider.launching = None
        launching.callback(None)
        (only,) = self.provider.instances
        self.assertEqual([one.instance_id for one in self.owner.written], [only])
        self.assertEqual(self.owner.disk.agent_host, "")
        booting.callback(None)
        up = self.successResultOf(came_up)
        self.assertEqual((up.instance.id, self.owner.disk.agent_host), (only, up.instance.address))
        self.assertIsNotNone(self.machine.client)

    def test_killed_after_any_write_the_next_daemon_has_the_same_vm(self) -> None:
        for last in (1, 2):
            with self.subTest(last=last):
                self.setUp()
                self.owner.last = last
                self.failureResultOf(self.up(), Killed)
                again = Owner(self.owner.disk)
                up = self.successResultOf(self.up(PodMachine(self.world.node_provider, again)))
                self.assertEqual(list(self.provider.instances), [up.instance.id])
                self.assertEqual(self.calls.count("launch"), 3 - last, "asked again only without an address")

    def test_an_agent_that_starts_slowly_is_asked_until_it_answers(self) -> None:
        booting: Deferred[None] = Deferred()
        self.provider.booting = booting
        came_up = self.up()
        self.world.agents[ID].away = True
        booting.callback(None)
        self.world.wait(20)
        self.assertNoResult(came_up)
        self.world.agents[ID].away = False
        self.world.wait(3)
        self.successResultOf(came_up)

    def test_an_agent_that_begins_to_listen_is_found_soon_by_how_long_it_took(self) -> None:
        """Of the real client: each question is a connection, whatever became of those before."""
        clock = self.world.clock
        began = clock.seconds()
        tried: list[float] = []

        @implementer(IStreamClientEndpoint)
        class Endpoint:
            def connect(self, factory: object) -> Deferred[Any]:
                tried.append(clock.seconds() - began)
                return fail(ConnectionRefusedError())

        channel = Channel(clock, Endpoint(), backoff=RECONNECT)
        self.patch(self.world.node_provider, "connect", lambda *_: AgentClient(ID, channel))
        self.up()
        for _ in range(6000):
            clock.advance(0.01)
        waits = [later - at for at, later in pairwise(tried)]
        for at, wait in zip(tried, waits, strict=False):
            self.assertLess(wait, 0.05 + min(0.25 * at, LONGEST_PAUSE), f"after {at:.2f} s")
        self.assertLess(len(tried), 60)

    def test_its_client_is_there_before_the_agent_has_answered(self) -> None:
        connected: list[bool] = []
        booting: Deferred[None] = Deferred()
        self.provider.booting = booting
        deadline = self.world.clock.seconds() + 100.0
        came_up = start(
            self.machine.bring_up(
                VmRequest(Size()), deadline, lambda: connected.append(self.machine.client is not None)
            )
        )
        self.world.agents[ID].away = True
        booting.callback(None)
        self.assertEqual(connected, [True])
        self.assertNoResult(came_up)
        came_up.cancel()
        self.failureResultOf(came_up, CancelledError)
        self.successResultOf(self.down())

    def test_an_agent_that_never_answers_fails_it_in_time(self) -> None:
        booting: Deferred[None] = Deferred()
        self.provider.booting = booting
        came_up = self.up()
        self.world.agents[ID].away = True
        booting.callback(None)
        self.world.wait(101)
        self.assertIn("did not answer within 100 s", str(self.failureResultOf(came_up, DeadlineExceeded)))

    def test_an_agent_of_another_vm_is_refused(self) -> None:
        booting: Deferred[None] = Deferred()
        self.provider.booting = booting
        came_up = self.up()
        self.world.agents[ID].sandbox_id = "f" * 32
        booting.callback(None)
        self.failureResultOf(came_up, FailedPrecondition)

    def test_a_vm_that_ended_while_no_daemon_ran_is_not_made_again(self) -> None:
        self.successResultOf(self.up())
        self.provider.end(self.owner.disk.instance_id, "power")
        again = PodMachine(self.world.node_provider, Owner(self.owner.disk))
        found = self.successResultOf(start(again.look(5.0)))
        self.assertIs(found.state, InstanceState.ENDED)
        self.assertIn("power", str(self.failureResultOf(self.up(again), Unavailable)))
        self.assertEqual(self.calls, ["launch"])

    def test_a_launch_has_three_steps_and_says_how_long_each_took(self) -> None:
        launching: Deferred[None] = Deferred()
        booting: Deferred[None] = Deferred()
        self.provider.launching, self.provider.booting = launching, booting
        began = self.world.now()
        came_up = self.up()
        self.world.clock.advance(2)
        launching.callback(None)
        self.world.clock.advance(3)
        self.world.agents[ID].away = True
        booting.callback(None)
        self.world.wait(5)
        self.world.agents[ID].away = False
        self.world.wait(5)
        self.assertEqual(self.successResultOf(came_up).vm_seconds, 5)
        (request, asked), (boot, booted), (agent, answered) = self.machine.timeline.launch_steps(began)
        self.assertEqual((request, boot, agent), (LaunchStep.REQUEST, LaunchStep.BOOT, LaunchStep.AGENT))
        self.assertEqual((asked, booted), (2, 3))
        self.assertTrue(5 <= answered < 10, answered)
        said = [step.detail for step in self.machine.timeline.steps]
        instance = self.machine.instance
        assert instance is not None
        self.assertEqual(said[:2], [f"fake: {instance.id}", f"address {instance.address}"])

    def test_the_next_daemons_launch_has_a_boot_and_an_agent(self) -> None:
        self.successResultOf(self.up())
        again = PodMachine(self.world.node_provider, Owner(self.owner.disk))
        self.successResultOf(self.up(again))
        steps = [step for step, _ in again.timeline.launch_steps(0)]
        self.assertEqual(steps, [LaunchStep.BOOT, LaunchStep.AGENT])

    def test_one_that_was_last_seen_booting_is_waited_for(self) -> None:
        self.successResultOf(self.up())
        again = PodMachine(self.world.node_provider, Owner(self.owner.disk))
        (only,) = self.provider.instances.values()
        again.instance = attrs.evolve(only, state=InstanceState.PENDING)
        up = self.successResultOf(self.up(again))
        self.assertIs(up.instance.state, InstanceState.RUNNING)

    def test_an_agent_has_time_to_answer_and_never_longer_than_the_launch(self) -> None:
        given: list[float] = []

        async def info(within: float = 30.0) -> Any:
            given.append(within)
            await sleep(self.world.clock, within)
            raise Unavailable("no answer")

        self.patch(FakeAgent, "info", lambda agent, within=30.0: info(within))
        came_up = self.up()
        self.world.wait(110)
        self.failureResultOf(came_up, DeadlineExceeded)
        self.assertEqual(given[0], INFO_SECONDS)
        self.assertLess(given[-1], INFO_SECONDS)

    def test_a_vm_that_is_gone_while_no_daemon_ran_is_not_made_again(self) -> None:
        self.successResultOf(self.up())
        self.provider.instances.clear()
        again = PodMachine(self.world.node_provider, Owner(self.owner.disk))
        self.assertIn("its VM is gone", str(self.failureResultOf(self.up(again), Unavailable).value))
        self.assertIsNone(self.successResultOf(start(again.look(5.0))))
        self.assertEqual(self.calls, ["launch"])

    def test_a_provider_that_does_not_answer_is_not_waited_for_forever(self) -> None:
        self.provider.booting = Deferred()
        came_up = self.up()
        self.world.wait(100 + MARGIN_SECONDS - 1)
        self.assertNoResult(came_up)
        self.world.wait(2)
        self.failureResultOf(came_up, DeadlineExceeded)
        never: Deferred[None] = Deferred()
        self.patch(self.provider, "get", lambda id: never)
        looking = start(self.machine.look(5.0))
        self.world.wait(6)
        self.failureResultOf(looking, DeadlineExceeded)


class AgentTests(MachineCase):
    """What the VM's agent is asked once it is up."""

    def setUp(self) -> None:
        super().setUp()
        self.successResultOf(self.up())
        self.agent = self.world.agents[ID]
        self.asked = 0
        real = self.agent.info

        async def info(within: float = 30.0) -> Any:
            self.asked += 1
            return await real(within)

        self.patch(self.agent, "info", info)

    def configure(self, contprovider: str) -> Deferred[None]:
        return start(self.machine.configure(cri.PodSandboxConfig(), cri.DNSConfig(), contprovider))

    def takes_layers(self, machine: PodMachine | None = None) -> bool:
        """Return what the agent said of layers, without asking it if it was asked before."""
        return self.successResultOf(start((machine or self.machine).takes_layers()))

    def test_it_has_one_client_as_long_as_it_is_there(self) -> None:
        client = self.machine.client
        connected: list[str] = []
        self.patch(self.world.node_provider, "connect", lambda id, host, port, endpoint: connected.append(id))
        for _ in range(2):
            self.assertIs(self.machine.connect(), client)
        self.assertEqual(connected, [])

    def test_what_it_said_when_it_came_up_is_not_asked_again(self) -> None:
        self.assertFalse(self.takes_layers())
        self.successResultOf(self.configure(""))
        self.assertEqual((self.takes_layers(), self.asked), (False, 0))
        self.successResultOf(self.configure("docker"))  # what takes layers may be another now
        for _ in range(2):
            self.takes_layers()
        self.assertEqual(self.asked, 1)
        again = PodMachine(self.world.node_provider, self.owner)  # the next daemon's
        for _ in range(2):
            self.assertFalse(self.takes_layers(again))
        self.assertEqual(self.asked, 2)

    def test_it_answers_in_time_and_as_itself_or_it_does_not(self) -> None:
        self.assertTrue(self.successResultOf(start(self.machine.answers(5.0))))
        self.agent.sandbox_id = "f" * 32
        self.assertFalse(self.successResultOf(start(self.machine.answers(5.0))))
        self.agent.away = True
        self.assertFalse(self.successResultOf(start(self.machine.answers(5.0))))

    def test_rules_of_services_are_waited_for_where_it_is_sent_any(self) -> None:
        self.assertTrue(self.successResultOf(start(self.machine.has_rules(5.0))))
        services = self.world.node_provider.services = FakeServices()
        self.machine.tell_of_services()
        for told in (False, True):
            waiting = start(self.machine.has_rules(5.0))
            self.assertNoResult(waiting)
            if told:
                services.senders[0].told.succeed(None)
            else:
                self.world.clock.advance(6)
            self.assertIs(self.successResultOf(waiting), told)

    def test_one_without_our_agent_is_told_none_and_waits_for_the_node_s_own_rules(self) -> None:
        self.owner.facts = attrs.evolve(self.owner.facts, agent_port=0)
        services = self.world.node_provider.services = FakeServices()
        self.machine.tell_of_services()
        self.assertIsNone(self.machine.rules)
        self.world.node_provider.node_services = on_node = FakeNodeServices()
        self.machine.tell_of_services()
        waiting = start(self.machine.has_rules(5.0))
        self.assertNoResult(waiting)
        on_node.rules.told.succeed(None)
        self.assertTrue(self.successResultOf(waiting))
        self.successResultOf(self.machine.disconnect())
        self.assertEqual((on_node.rules.stopped, services.senders), (0, []))
        self.assertIsNone(self.machine.rules)

    def reach(self, endpoint: Any) -> None:  # Any: what leads to agents, which nobody uses here
        """Have the provider reach its VMs' agents by `endpoint`."""
        alsoProvides(self.provider, IReachesAgents)
        self.provider.agent_endpoint = lambda instance_id: endpoint  # type: ignore[attr-defined]

    def test_it_is_called_by_its_providers_channel_and_needs_no_certificate(self) -> None:
        self.assertEqual((self.world.endpoints, self.machine.needs_certificate), ([None], True))
        endpoint = object()
        self.reach(endpoint)
        again = PodMachine(self.world.node_provider, Owner(self.owner.disk))
        again.connect()
        self.assertIs(self.world.endpoints[-1], endpoint)
        self.assertFalse(again.needs_certificate)
        self.successResultOf(start(again.replace_first_certificate()))
        self.assertEqual(self.agent.certificates, [])

    def test_one_of_an_earlier_release_is_called_by_tls_all_the_same(self) -> None:
        self.reach(None)
        again = PodMachine(self.world.node_provider, Owner(self.owner.disk))
        again.connect()
        self.assertIsNone(self.world.endpoints[-1])
        self.assertTrue(again.needs_certificate)
        self.successResultOf(start(again.replace_first_certificate()))
        self.assertEqual(len(self.agent.certificates), 1)

    def test_one_without_our_agent_has_neither(self) -> None:
        self.reach(object())
        facts = attrs.evolve(self.owner.disk, agent_port=0)
        again = PodMachine(self.world.node_provider, Owner(facts))
        self.assertFalse(again.needs_certificate)
        self.assertIsNone(again._endpoint())

    def test_once_it_is_no_longer_connected_nothing_is_asked_of_it(self) -> None:
        self.agent.clocks = lambda: (5, 5)
        self.successResultOf(self.machine.disconnect())
        self.failureResultOf(start(self.machine.renew_certificate()), Unavailable)
        self.successResultOf(start(self.machine.correct_clock()))
        self.assertEqual((self.agent.certificates, self.agent.corrections), ([], []))


class TearDownTests(MachineCase):
    """From any stage to nothing."""

    def test_nothing_was_asked_for(self) -> None:
        self.successResultOf(self.down())
        self.assertEqual(self.calls, [])

    def test_up(self) -> None:
        self.successResultOf(self.up())
        for _ in range(2):
            self.successResultOf(self.down())
            self.assertEqual((self.provider.instances, self.machine.client), ({}, None))

    def test_a_launch_that_is_cancelled_is_waited_for_and_its_vm_destroyed(self) -> None:
        launching: Deferred[None] = Deferred()
        self.provider.launching = launching
        came_up = self.up()
        came_up.cancel()
        self.failureResultOf(came_up, CancelledError)
        down = self.down()
        self.assertNoResult(down)
        self.assertEqual(self.calls, ["launch"])
        self.provider.launching = None
        self.patch(self.provider, "list", lambda: fail(Unavailable("not now")))  # the answer says which
        launching.callback(None)
        self.successResultOf(down)
        self.assertEqual((self.calls, self.provider.instances), (["launch", "destroy"], {}))

    def test_while_the_provider_does_not_answer_it_is_not_known_what_there_is(self) -> None:
        launching: Deferred[None] = Deferred()
        self.provider.launching = launching
        self.up().addErrback(lambda _: None).cancel()
        down = self.down()
        self.world.wait(31)
        self.failureResultOf(down, DeadlineExceeded)
        launching.callback(None)
        self.successResultOf(self.down())
        self.assertEqual(self.provider.instances, {})

    def test_a_launch_that_failed_left_nothing(self) -> None:
        self.provider.launch_error = ResourceExhausted("no capacity")
        self.failureResultOf(self.up(), ResourceExhausted)
        self.successResultOf(self.down())
        self.assertEqual(self.calls, ["launch"])

    def test_an_answer_that_no_daemon_recorded_is_found_by_its_token(self) -> None:
        self.successResultOf(self.up())
        self.machine = PodMachine(self.world.node_provider, Owner(VmFacts(ID, TOKEN)))
        self.successResultOf(self.down())
        self.assertEqual(self.provider.instances, {})

    def test_finding_it_by_its_token_costs_no_other_vm(self) -> None:
        neighbour = PodMachine(self.world.node_provider, Owner(VmFacts("2d" * 16, "71" * 16)))
        kept = self.successResultOf(self.up(neighbour)).instance
        self.successResultOf(self.up())
        self.machine = PodMachine(self.world.node_provider, Owner(VmFacts(ID, TOKEN)))
        self.successResultOf(self.down())
        self.assertEqual(self.provider.instances, {kept.id: kept})

    def test_without_a_token_nothing_is_destroyed(self) -> None:
        self.successResultOf(self.up())
        self.machine = PodMachine(self.world.node_provider, Owner(VmFacts(ID, "")))
        self.failureResultOf(self.down(), ValueError)
        self.assertEqual(len(self.provider.instances), 1)

    def test_a_recorded_vm_is_destroyed_without_a_look_at_the_others(self) -> None:
        neighbour = PodMachine(self.world.node_provider, Owner(VmFacts("2d" * 16, "71" * 16)))
        kept = self.successResultOf(self.up(neighbour)).instance
        self.successResultOf(self.up())
        self.patch(self.provider, "list", lambda: fail(Unavailable("not now")))
        self.successResultOf(self.down())
        self.assertEqual(self.provider.instances, {kept.id: kept})

    def test_nothing_is_sent_to_it_any_more(self) -> None:
        services = self.world.node_provider.services = FakeServices()
        self.successResultOf(self.up())
        self.machine.tell_of_services()
        self.machine.tell_of_services()
        self.successResultOf(self.down())
        self.assertEqual([(each.started, each.stopped) for each in services.senders], [(1, 1)])
        self.assertIsNone(self.machine.rules)

    def test_nobody_connects_to_it_again(self) -> None:
        """Whoever was waiting for its agent would otherwise tell a VM of Services that is no more."""
        services = self.world.node_provider.services = FakeServices()
        self.successResultOf(self.up())
        self.successResultOf(self.down())
        self.machine.tell_of_services()
        self.assertRaises(Unavailable, self.machine.connect)
        self.assertFalse(self.successResultOf(start(self.machine.answers(5.0))))
        self.assertEqual((services.senders, self.machine.client), ([], None))

    def test_a_provider_that_does_not_get_done_with_it_is_told_by_what_it_was_to_do(self) -> None:
        self.successResultOf(self.up())
        never: Deferred[None] = Deferred()
        self.patch(self.provider, "destroy", lambda id: never)
        down = self.down()
        self.world.wait(31)
        words = str(self.failureResultOf(down, DeadlineExceeded).value)
        self.assertIn(f"destroying the VM of sandbox {ID}", words)

    def test_what_can_not_be_destroyed_is_tried_again(self) -> None:
        self.successResultOf(self.up())
        self.provider.destroy_error = Unavailable("not now")
        self.failureResultOf(self.down(), Unavailable)
        self.provider.destroy_error = None
        self.successResultOf(self.down())
        self.assertEqual(self.provider.instances, {})

    def test_before_the_provider_has_started_nothing_is_asked(self) -> None:
        self.successResultOf(self.up())
        self.world.node_provider.trouble = "starting"
        self.failureResultOf(self.down(), Unavailable)
        self.assertEqual(self.calls, ["launch"])

    def test_host_ports_are_taken_away_before_the_address_is_free(self) -> None:
        self.successResultOf(self.up())
        released: list[str] = []

        async def release_address(id: str) -> None:
            released.append(id)
            self.assertEqual(len(self.provider.instances), 1)

        self.patch(self.world.node_provider, "release_address", release_address)
        self.successResultOf(self.down())
        self.assertEqual(released, [ID])


class ProcessTests(MachineCase):
    """A VM that is a process of the node."""

    def test_the_node_says_where_it_counts_and_runs(self) -> None:
        self.successResultOf(self.up())
        told: list[tuple[object, ...]] = []

        def tell(*words: Any) -> Deferred[None]:
            told.append(words)
            return succeed(None)

        def both() -> None:
            self.successResultOf(start(self.machine.place("/kubepods/pod1", Size(1000))))
            self.successResultOf(start(self.machine.pin("0-1", "0")))

        both()
        for interface, method in ((IPlacesVms, "place"), (IPinsVms, "pin")):
            setattr(self.provider, method, tell)
            alsoProvides(self.provider, interface)
        self.assertEqual(told, [], "a VM elsewhere")
        both()
        (id,) = self.provider.instances
        self.assertEqual(told, [(id, "/kubepods/pod1", Size(1000)), (id, "0-1", "0")])
        self.successResultOf(start(self.machine.place("", Size(1000))))
        self.assertEqual(len(told), 2, "a pod without a control group")


class OwnerTests(MachineCase):
    """The VM changes owners."""

    def test_handed_over_its_facts_are_the_new_owners(self) -> None:
        self.successResultOf(self.up())
        client = self.machine.client
        new = Owner(self.owner.disk)
        before = len(self.owner.written)
        self.machine.hand_over(new)
        self.successResultOf(start(self.machine.renew_certificate()))
        self.assertEqual((len(self.owner.written), len(new.written)), (before, 1))
        self.assertIs(self.machine.client, client)

    def test_a_certificate_that_can_not_be_recorded_is_in_force_and_that_is_told(self) -> None:
        self.successResultOf(self.up())
        self.patch(self.owner, "write", lambda facts: fail(ResourceExhausted("the disk is full")))
        with capturedLogs() as logged:
            self.successResultOf(start(self.machine.renew_certificate()))
        self.assertEqual(len(self.world.agents[ID].certificates), 1)
        words = " ".join(formatEvent(event) for event in logged)
        self.assertIn(f"the certificate of sandbox {ID} was not recorded", words)
        self.assertIn("the disk is full", words)

    def test_a_certificate_that_comes_after_its_end_is_not_recorded(self) -> None:
        self.successResultOf(self.up())
        before = len(self.owner.written)
        waiting: Deferred[None] = Deferred()

        async def rekey(certificate: str, within: float = 30.0) -> None:
            await waiting

        self.patch(self.world.agents[ID], "rekey", rekey)
        renewed = Flight(self.machine.renew_certificate())
        self.successResultOf(self.down())
        waiting.callback(None)
        self.successResultOf(renewed.join())
        self.assertEqual(len(self.owner.written), before)
