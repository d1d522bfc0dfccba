# SPDX-License-Identifier: Apache-2.0
"""The call of ``proto/control.proto`` that tells what pods use."""

from __future__ import annotations

from twisted.internet.interfaces import IReactorTime

from infranetes.pods.node.inventory import Inventory, Sandbox
from infranetes.pods.node.node_providers import Providers
from infranetes.pods.store.states import SandboxState
from infranetes.pods.vm.guest_view import GuestView, look, way_of
from infranetes.providers.hypervisor import GuestState
from infranetes.stats.gather import WAIT_SECONDS, Figures, Gatherer
from infranetes_common.concurrency import start
from infranetes_common.redaction import redacted
from infranetes_common.wire import control
from infranetes_common.wire.control_rpcs import ControlUsageRpcs
from txgrpc import Call

_WHY = {
    GuestState.PREPARED: "its guest does not execute yet",
    GuestState.RUNNING: "its hypervisor does not tell them",
    GuestState.OFF: "its guest is off",
    GuestState.CRASHED: "its guest has crashed",
}
_MOST = (1 << 64) - 1


class UsageCalls(ControlUsageRpcs):
    """Answers with what pods use, as their VMs' agents say."""

    def __init__(
        self, clock: IReactorTime, inventory: Inventory, providers: Providers, gatherer: Gatherer
    ) -> None:
        self._clock = clock
        self._inventory = inventory
        self._providers = providers
        self._gatherer = gatherer

    async def ListUsage(self, request: control.ListUsageRequest, call: Call) -> control.ListUsageResponse:
        ready = [sandbox for sandbox in self._inventory if sandbox.state is SandboxState.READY]
        figures = await self._gatherer.now(ready)
        pods = {sandbox.id: _usage(sandbox, figures.get(sandbox.id)) for sandbox in ready}
        silent = [sandbox for sandbox in ready if sandbox.id not in figures and way_of(sandbox)]
        asked = [
            start(look(self._clock, self._providers, sandbox, seconds=WAIT_SECONDS)) for sandbox in silent
        ]
        for sandbox, guest in zip(silent, asked, strict=True):
            pods[sandbox.id].why = _why(await guest)
        return control.ListUsageResponse(pods=list(pods.values()))


def _why(guest: GuestView | None) -> str:
    """Return why a guest without our agent has no figures."""
    if guest is None:
        return "its VM is gone"
    if guest.status is None:
        return redacted(guest.trouble)
    words = _WHY[guest.status.state]
    return f"{words} ({guest.status.reason})" if guest.status.reason else words


def _usage(sandbox: Sandbox, figures: Figures | None) -> control.PodUsage:
    metadata, info = sandbox.config.metadata, sandbox.machine.info
    shown = control.PodUsage(
        id=sandbox.id,
        namespace=metadata.namespace,
        name=metadata.name,
        vm_id=sandbox.record.instance_id,
        agent=sandbox.watch.reach.value if sandbox.watch is not None else "",
        cpus=info.cpus if info is not None else 0,
    )
    if figures is None:
        return shown
    used, cards = figures.stats.machine, figures.stats.cards
    shown.measured_at = used.time_nanos
    shown.cpu_nanos = used.cpu.total_nanos
    if used.cpu.HasField("nano_cores"):
        shown.nano_cores = used.cpu.nano_cores.value
    shown.memory_bytes, shown.memory_limit_bytes = used.memory.working_set, used.memory.limit
    if cards:
        shown.received_bytes = min(sum(card.received_bytes for card in cards), _MOST)
        shown.sent_bytes = min(sum(card.sent_bytes for card in cards), _MOST)
    shown.processes = used.processes
    return shown
