# SPDX-License-Identifier: Apache-2.0
"""What can be seen of a pod's guest from outside: by which way it is reached, its state, its screen."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import attrs
from twisted.internet.interfaces import IReactorTime

from infranetes.machines.agentless.agent import AgentlessAgent
from infranetes.machines.agentless.ways import NONE, PROBE_SECONDS
from infranetes.pods.node.inventory import Sandbox
from infranetes.pods.node.node_providers import Providers
from infranetes.pods.store.states import WITH_VM
from infranetes.providers.hypervisor import GuestState, GuestStatus, IHasHypervisors, IHypervisor
from infranetes_common.concurrency import start, within
from infranetes_common.errors import FailedPrecondition, InfranetesError, NotFound, NotOffered

AGENT = "agent"  # the way of guests that have our agent
CONSOLE = "console"  # what is left where no way has answered
STATUS_SECONDS = 5.0


@attrs.frozen
class GuestView:
    """A guest, as it is seen.

    :ivar way: agent, or the name of the way that has answered; none.
    :ivar troubles: why the others did not, by their names. :ivar status: None: it is not known, by `trouble`.
    """

    way: str
    troubles: Mapping[str, str]
    status: GuestStatus | None
    trouble: str = ""


def hypervisor_of(providers: Providers, sandbox: Sandbox) -> IHypervisor:
    """Return the hypervisor of a pod's VM, which was booted from an image of anybody's.

    :raise FailedPrecondition: it has no VM. :raise NotOffered: its VM is of another kind."""
    record = sandbox.record
    if record.state not in WITH_VM or not record.instance_id:
        raise FailedPrecondition(
            f"sandbox {sandbox.id} is {record.state.value} and has no VM; `infranetes-ctl describe` says why"
        )
    node_provider = providers.of(record)
    if not IHasHypervisors.providedBy(node_provider.provider):
        raise NotOffered(
            f"VM {record.instance_id} of pod {sandbox.pod} shows no screen: provider "
            f"{node_provider.name} has none to show; QEMU has, of pods whose image is the VM"
        )
    try:
        hypervisor: IHypervisor = node_provider.provider.hypervisor(record.instance_id)
    except NotFound:
        raise NotOffered(
            f"VM {record.instance_id} of pod {sandbox.pod} has no screen: it was not booted from an image of "
            "its pod's; `infranetes-ctl console` shows what it wrote"
        ) from None
    return hypervisor


def has_screen(providers: Providers, sandbox: Sandbox) -> bool:
    """Return whether a pod's VM has a screen that can be connected to, as far as is known."""
    try:
        hypervisor_of(providers, sandbox).screen()
    except InfranetesError:
        return False
    return True


def way_of(sandbox: Sandbox) -> str:
    """Return by which way a pod's guest was reached last, or console; "": it has our agent, or no VM."""
    agent = sandbox.client
    if not isinstance(agent, AgentlessAgent):
        return ""
    return CONSOLE if agent.ways.name == NONE else agent.ways.name


async def look(
    clock: IReactorTime,
    providers: Providers,
    sandbox: Sandbox,
    *,
    ask: bool = False,
    seconds: float = STATUS_SECONDS,
) -> GuestView | None:
    """Return what is seen of a pod's guest; None: its VM was not booted from an image of anybody's.

    Takes no longer than the deadlines here, and does not fail.

    :param ask: whether the ways into it are asked now; else it is told which one answered last.
    :param seconds: that the hypervisor has to tell its state."""
    try:
        hypervisor = hypervisor_of(providers, sandbox)
    except InfranetesError:
        return None
    status, trouble = None, ""
    try:
        status = await within(clock, seconds, hypervisor.status(), "the hypervisor's answer")
    except InfranetesError as error:
        trouble = str(error)
    agent = sandbox.client
    if not isinstance(agent, AgentlessAgent):
        return GuestView(AGENT, {}, status, trouble)
    if ask and status is not None and status.state is GuestState.RUNNING:
        with suppress(InfranetesError):  # `troubles` says why
            await within(clock, PROBE_SECONDS + 1, start(agent.ways.open()), "the ways into the guest")
    return GuestView(agent.ways.name, dict(agent.ways.troubles), status, trouble)
