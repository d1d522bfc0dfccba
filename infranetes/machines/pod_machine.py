# SPDX-License-Identifier: Apache-2.0
"""A pod's VM: how it is brought up and torn down, for whichever owner.

    Stage      what is true                                  in the record             goes to
    NEW        no VM was asked for                           id, token                 ASKED GONE
    ASKED      the provider is asked, by token; it may have  id, token                 LAUNCHED ENDING
               made the VM, and has not answered
    LAUNCHED   there is a VM; it has no address yet          + instance_id             RUNNING ENDING
    RUNNING    it has an address, its agent is starting      + address, agent's, cert. UP ENDING
    UP         its agent has answered, under the VM's id     the same                  ENDING
    ENDING     the agent's client is closed, the VM is       the same                  GONE, or ENDING
               being destroyed                                                         again if that fails
    GONE       the provider has destroyed it                 the same                  (deleted)

The stage is not stored: the facts in the record tell it. The VM's owner, a sandbox or the pool, records
that it wants a VM before `bring_up`, and that it wants none before `tear_down`. In between each fact is on
the disk before the next step is made. A daemon that finds

    no agent_host   asks the provider again with the same token, and is answered with the VM in flight;
    an agent_host   waits for that VM, and makes no other.

A launch at the provider is never cut short: only its answer tells what has to be destroyed. So `bring_up`
may be cancelled or fail at any step, and `tear_down` then waits for that answer first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.logger import Logger

from infranetes.identity.certificates import Signed
from infranetes.machines.clock_reading import correct_clock, read_clock
from infranetes.machines.context import MachineContext, NodeServices, RuleSender, VmFacts, VmOwner
from infranetes.machines.interface import IAgent
from infranetes.machines.spec import first_certificate, instance_spec
from infranetes.machines.timeline import Timeline
from infranetes.observer import LaunchStep, call_to_provider
from infranetes.providers.interface import (
    IGivesIdentityPrivately,
    Instance,
    InstanceSpec,
    InstanceState,
    IPinsVms,
    IPlacesVms,
    IReachesAgents,
    Size,
    VmRequest,
    launched_with,
)
from infranetes.providers.stopping import IStopsVms
from infranetes_common.concurrency import Flight, backoff, sleep, start, within
from infranetes_common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InfranetesError,
    NotFound,
    NotOffered,
    Unavailable,
)
from infranetes_common.wire import cri, vmserver

MARGIN_SECONDS = 5.0  # added to the provider's own deadline, whose error tells more of the cause
FIRST_PAUSE, LONGEST_PAUSE = 0.03, 2.0  # seconds between two questions to an agent that is starting
GROWTH = 1.2  # of those pauses: a pod waits no more than about a fifth longer than its agent starts
INFO_SECONDS = 10.0
SPREAD = 0.1  # of a lifetime, so that certificates made together are not all replaced together
_NANOS = 1e9

T = TypeVar("T")

_log = Logger()


@attrs.frozen
class BroughtUp:
    """A VM that is up, and how long the provider took for it."""

    instance: Instance
    vm_seconds: float


class PodMachine:
    """One VM, from the request for it until it is destroyed; see the table above.

    :param owner: keeps the VM's record.
    :ivar instance: what the provider last said of the VM; None before it has said anything to this process.
    :ivar client: the client of its agent, while there is one.
    :ivar info: what its agent last said of the machine; None before it has said anything to this process.
    :ivar node_services: what translates Services' addresses for it outside of it, from `tell_of_services`
        until `disconnect`; None: nothing does.
    :ivar timeline: what has happened to it, and to its pod, in this process.
    """

    def __init__(self, context: MachineContext, owner: VmOwner) -> None:
        self.instance: Instance | None = None
        self.client: IAgent | None = None
        self.info: vmserver.InfoResponse | None = None
        self.node_services: NodeServices | None = None
        self.timeline = Timeline(context.now)
        self._context = context
        self._owner = owner
        self._launch: Flight[Instance] | None = None  # the launch at the provider, if this process made one
        self._takes_layers: bool | None = None  # the agent's answer; None: this process has not asked
        self._sender: RuleSender | None = None
        self._disconnected = False

    @property
    def id(self) -> str:
        """The id in its tags and its certificate."""
        return self.facts.id

    @property
    def facts(self) -> VmFacts:
        """The facts of it in its owner's record."""
        return self._owner.facts

    @property
    def has_agent(self) -> bool:
        """Whether our agent is in the VM, once its address is known."""
        return self.facts.agent_port > 0

    def hand_over(self, owner: VmOwner) -> None:
        """Give the VM to `owner`, whose record has its facts already."""
        self._owner = owner

    async def bring_up(
        self,
        request: VmRequest,
        deadline: float,
        connected: Callable[[], None] = lambda: None,
        kept: Path | None = None,
        brief: bool = False,
    ) -> BroughtUp:
        """Launch the VM, or find the one that was launched before, and wait until its agent answers.

        :param request: for a VM that is still to be made.
        :param deadline: by the context's clock.
        :param connected: called when there is a client of the agent, before the agent has answered.
        :param kept: the directory of the kept state that a VM starts from which is still to be made.
        :param brief: the VM is needed only until its agent has answered.
        :raise InfranetesError: some step failed; there may be a VM."""
        began = self._context.clock.seconds()
        if self.facts.agent_host:
            with self.timeline.step("the VM that was made before is waited for", launch=LaunchStep.BOOT):
                instance = await self._wait_for_known(deadline)
        else:
            instance = await self._launch_and_wait(request, deadline, kept, brief)
        vm_seconds = self._context.clock.seconds() - began
        client = self.connect()
        connected()
        with self.timeline.step("the agent in the VM starts, and answers", launch=LaunchStep.AGENT):
            await self._greet(client, deadline)
        return BroughtUp(instance, vm_seconds)

    async def tear_down(self) -> None:
        """Close the agent's client and destroy the VM, if there is one. Idempotent.

        :raise InfranetesError: it is not known whether it is destroyed; try again."""
        self.disconnect()
        with self.timeline.step("the VM is destroyed"):
            await self._settle_launch()
            self._context.check_ready()
            await self._context.release_address(self.id)
            await self._destroy()

    # ---- the agent

    def connect(self) -> IAgent:
        """Return the client of its agent, which connects at its first call.

        :raise Unavailable: `disconnect` was called: the VM is gone, or is being ended."""
        if self._disconnected:
            raise Unavailable(f"the agent of sandbox {self.id} is no longer connected")
        if self.client is None:
            facts = self.facts
            self.client = self._context.connect(
                facts.id, facts.agent_host, facts.agent_port, self._endpoint()
            )
        return self.client

    def _endpoint(self) -> IStreamClientEndpoint | None:
        """Return what alone leads to its agent; None: its address does."""
        provider = self._context.provider
        if not self.has_agent or not IReachesAgents.providedBy(provider):
            return None
        endpoint: IStreamClientEndpoint | None = provider.agent_endpoint(self.facts.instance_id)
        return endpoint

    def tell_of_services(self) -> None:
        """Keep the VM's service proxy up to date, where this node does that. Idempotent.

        A VM without our agent has none, and is told nothing: it is the node's that serves it, if any does.
        Does nothing once `disconnect` was called."""
        services = self._context.services
        if services is None or self._disconnected:
            return
        if not self.has_agent:
            self.node_services = self._context.node_services
        elif self._sender is None:
            self._sender = services.sender(self.connect())
            self._sender.start()

    @property
    def rules(self) -> RuleSender | None:
        """What sends the rules of Services to where they are in force for it; None: to nowhere."""
        return self._sender if self.node_services is None else self.node_services.rules

    def stop_telling(self) -> None:
        """Send the VM no more rules of Services. Idempotent."""
        if self._sender is not None:
            self._sender.stop()

    async def has_rules(self, seconds: float) -> bool:
        """Wait until all rules of Services are in force for it; return whether they are, or are not to be."""
        rules = self.rules
        if rules is None:
            return True
        try:
            await within(self._context.clock, seconds, rules.when_told(), "the rules of Services")
        except DeadlineExceeded:
            return False
        return True

    def disconnect(self) -> Deferred[None]:
        """Close the agent's client for good. Fires once it is closed, and never fails. Idempotent."""
        self._disconnected = True
        self.stop_telling()
        self._sender = self.node_services = None
        client, self.client = self.client, None
        return start(_close(client))

    async def answers(self, seconds: float) -> bool:
        """Whether its agent answers in time, under the VM's id."""
        try:
            info = await self.connect().info(within=seconds)
        except InfranetesError as error:
            _log.info("vm {vm}: {error}", vm=self.facts.instance_id, error=error)
            return False
        return info.sandbox_id == self.id

    async def takes_layers(self) -> bool:
        """Whether its containers' images are made of layers. The agent is asked once.

        :raise InfranetesError: it can't be asked."""
        if self._takes_layers is None:
            self._takes_layers = (await self.connect().info()).takes_layers
        return self._takes_layers

    async def configure(
        self, config: cri.PodSandboxConfig, node_dns: cri.DNSConfig, contprovider: str
    ) -> None:
        """Make the VM the pod's, and have its containers run by `contprovider`; "": by the VM's default.

        :raise FailedPrecondition: the VM does not offer that.
        :raise InfranetesError: the agent can't be asked, refuses, or could not start it."""
        client = self.connect()
        with self.timeline.step("the VM is configured", contprovider):
            await client.configure(config, node_dns, contprovider)
        if contprovider:
            self._takes_layers = None  # the answer depends on the ContainerProvider

    async def warm_up(self) -> None:
        """Have the VM, which no pod has yet, run its first container. Idempotent.

        :raise InfranetesError: the agent can't be asked, or does not get done with it."""
        with contextlib.suppress(NotOffered), self.timeline.step("the VM runs a container of its own"):
            await self.connect().warm_up()

    @property
    def needs_certificate(self) -> bool:
        """Whether its agent shows a certificate when it is called."""
        return self.has_agent and self._endpoint() is None

    @property
    def first_key_is_private(self) -> bool:
        """Whether nobody else can have read the key that came with the VM's identity."""
        return IGivesIdentityPrivately.providedBy(self._context.provider)

    async def replace_first_certificate(self) -> None:
        """Replace the certificate that came with the VM's identity, unless that is as good as another.

        :raise InfranetesError: see `renew_certificate`."""
        now, lifetime = self._context.clock.seconds(), self._context.times.certificate
        if not self.needs_certificate:
            return
        if not self.first_key_is_private or is_due(self.facts, now, lifetime):
            await self.renew_certificate()

    async def renew_certificate(self) -> None:
        """Have the VM make a new key, and sign a certificate for it.

        :raise InfranetesError: the agent can't be asked or refuses; the old one is still in force."""
        client = self.client
        if client is None:
            raise Unavailable(f"the agent of sandbox {self.id} is no longer connected")
        with self.timeline.step("the VM gets a new certificate"):
            request = await client.new_key()
            signed = self._context.authority.sign(self.id, request, self._context.times.certificate)
            await client.rekey(signed.certificate_pem)
        if self.client is client:
            written = self._owner.write(_certified(self.facts, signed))
            self._context.note(written, f"the certificate of sandbox {self.id}")

    async def correct_clock(self) -> None:
        """Have the VM correct its clock, if it is wrong.

        :raise InfranetesError: the agent can't be asked."""
        client = self.client
        if client is not None:
            self.info, reading = await read_clock(client.info, self._context.now)
            await correct_clock(self.id, client, reading)

    # ---- the provider

    async def look(self, seconds: float) -> Instance | None:
        """Ask the provider for the VM; None: it has none.

        :raise InfranetesError: it can't say."""
        work = self._asked("get", lambda: self._context.provider.get(self.facts.instance_id))
        what = f"looking for the VM of sandbox {self.id}"
        try:
            self.instance = await within(self._context.clock, seconds, work, what)
        except NotFound:
            return None
        return self.instance

    async def stop_vm(self, seconds: float) -> None:
        """Close the agent's client for good, and have the provider, which can, stop the VM. Idempotent.

        :raise InfranetesError: it is not stopped, as far as is known."""
        self.disconnect()
        provider, instance_id = self._context.provider, self.facts.instance_id
        if not IStopsVms.providedBy(provider):
            raise FailedPrecondition(f"VMs of provider {provider.name} can't be stopped and started again")
        stopping = self._asked("stop_vm", lambda: provider.stop_vm(instance_id, seconds))
        with self.timeline.step("the VM is stopped", launch=LaunchStep.CONFIGURE):
            self.instance = await within(
                self._context.clock, seconds + MARGIN_SECONDS, stopping, f"the stop of VM {instance_id}"
            )

    async def place(self, cgroup_parent: str, size: Size) -> None:
        """Have the VM count in a control group of the node, if it is a process there. Idempotent.

        :raise InfranetesError: it does not."""
        provider = self._context.provider
        if cgroup_parent and IPlacesVms.providedBy(provider):
            await provider.place(self.facts.instance_id, cgroup_parent, size)

    async def pin(self, cpus: str, mems: str) -> None:
        """Have the VM run on these processors and memory nodes of the node, if it is a process there.

        :raise InfranetesError: it does not."""
        provider = self._context.provider
        if IPinsVms.providedBy(provider):
            await provider.pin(self.facts.instance_id, cpus, mems)

    async def _asked(self, method: str, call: Callable[[], Deferred[T]]) -> T:
        context = self._context
        return await call_to_provider(context.observer, context.clock, context.provider.name, method, call)

    async def _launch_and_wait(
        self, request: VmRequest, deadline: float, kept: Path | None, brief: bool
    ) -> Instance:
        provider = self._context.provider
        spec, what = attrs.evolve(self._spec(request, brief), kept=kept), "the provider is asked for a VM"
        with self.timeline.step(what, provider.name, launch=LaunchStep.REQUEST) as step:
            self._launch = Flight(self._asked("launch", lambda: provider.launch(spec)))
            self.instance = instance = await self._launch.join()
            step.say(f"{provider.name}: {instance.id} {instance.size}")
        await self._owner.write(attrs.evolve(self.facts, instance_id=instance.id))
        with self.timeline.step("the VM starts", launch=LaunchStep.BOOT) as step:
            self.instance = instance = await self._wait_running(instance.id, deadline)
            step.say(f"address {instance.address}")
        await self._owner.write(
            attrs.evolve(
                self.facts,
                address=instance.address,
                agent_host=instance.agent_host or instance.address,
                agent_port=instance.agent_port,
            )
        )
        return instance

    async def _wait_for_known(self, deadline: float) -> Instance:
        """Return the VM that was seen running before. :raise Unavailable: it no longer exists."""
        instance = self.instance
        if instance is not None and instance.state is InstanceState.ENDED:
            raise Unavailable(f"sandbox {self.id}: its VM has ended: {instance.detail}")
        if instance is None or instance.state is not InstanceState.RUNNING:
            try:
                self.instance = instance = await self._wait_running(self.facts.instance_id, deadline)
            except NotFound as error:
                raise Unavailable(f"sandbox {self.id}: its VM is gone: {error}") from None
        return instance

    async def _wait_running(self, instance_id: str, deadline: float) -> Instance:
        left = max(deadline - self._context.clock.seconds(), 1.0)
        provider = self._context.provider
        waiting = self._asked("wait_running", lambda: provider.wait_running(instance_id, left))
        return await within(
            self._context.clock, left + MARGIN_SECONDS, waiting, f"the VM of sandbox {self.id}"
        )

    def _spec(self, request: VmRequest, brief: bool) -> InstanceSpec:
        """Return the VM to make. Its first certificate comes with it, and is noted in the record."""
        signed = first_certificate(self._context, self.id, brief=brief)
        self._owner.note(_certified(self.facts, signed))
        return instance_spec(self._context, self.facts, request, signed)

    async def _greet(self, client: IAgent, deadline: float) -> None:
        """Wait until the agent answers, and make sure that it is the right one."""
        clock = self._context.clock
        pauses = backoff(FIRST_PAUSE, LONGEST_PAUSE, factor=GROWTH)
        while True:
            left, pause = deadline - clock.seconds(), next(pauses)
            try:
                asked = partial(client.info, within=max(min(left, INFO_SECONDS), 0.1))
                info, reading = await read_clock(asked, self._context.now)
                break
            except (Unavailable, DeadlineExceeded) as error:
                if left <= pause:
                    raise DeadlineExceeded(
                        f"the agent of sandbox {self.id} did not answer within "
                        f"{self._context.times.launch:.0f} s: {error}"
                    ) from None
            await sleep(clock, pause)
        if info.sandbox_id != self.id:
            raise FailedPrecondition(
                f"the machine at {self.facts.agent_host} is not sandbox {self.id}: its agent answers for "
                f"{info.sandbox_id[:64] or 'none'}"
            )
        self.info = info
        self._takes_layers = info.takes_layers
        await correct_clock(self.id, client, reading)

    # ---- the end

    async def _settle_launch(self) -> None:
        """Wait for the provider's answer to the launch: only that tells what has to be destroyed.

        :raise DeadlineExceeded: there is no answer yet."""
        if self._launch is None:
            return
        context = self._context
        what = "the provider's answer to a launch that is to be undone"
        try:
            instance = await within(context.clock, context.times.destroy, self._launch.join(), what)
            if not self.facts.instance_id:
                self._owner.note(attrs.evolve(self.facts, instance_id=instance.id))
        except DeadlineExceeded:
            raise
        except Exception as error:  # a launch that fails leaves nothing to destroy
            _log.debug("the launch of sandbox {sandbox} failed: {error}", sandbox=self.id, error=error)

    async def _destroy(self) -> None:
        context, facts = self._context, self.facts
        for instance_id in [facts.instance_id] if facts.instance_id else await self._unrecorded():
            destroying = self._asked("destroy", partial(context.provider.destroy, instance_id))
            what = f"destroying the VM of sandbox {facts.id}"
            await within(context.clock, context.times.destroy, destroying, what)

    async def _unrecorded(self) -> list[str]:
        """Return the ids of what a launch made whose answer was never recorded: the VMs with its token."""
        context = self._context
        listing = self._asked("list", context.provider.list)
        instances = await within(context.clock, context.times.destroy, listing, "listing the provider's VMs")
        return [instance.id for instance in launched_with(self.facts.token, instances)]


def is_due(facts: VmFacts, now: float, lifetime: float) -> bool:
    """Return whether a VM's certificate is to be renewed: half of its life is over, or its expiry unknown.

    VMs that were made at the same time are due at different times, by up to SPREAD of the lifetime.

    :param now: seconds since 1970 UTC. :param lifetime: seconds."""
    spread = SPREAD * lifetime * int(facts.id[:4], 16) / 0xFFFF
    return facts.certificate_until / _NANOS - now < lifetime / 2 + spread


def _certified(facts: VmFacts, signed: Signed) -> VmFacts:
    until = int(signed.until * _NANOS)
    return attrs.evolve(facts, certificate_until=until, certificate_key=signed.key_id)


async def _close(client: IAgent | None) -> None:
    try:
        if client is not None:
            await client.close()
    except (InfranetesError, CancelledError) as error:
        _log.debug("an agent's connection failed to close: {error}", error=error)
