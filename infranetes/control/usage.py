# SPDX-License-Identifier: Apache-2.0
"""The call of ``proto/control.proto`` that tells what pods use."""

from __future__ import annotations

from infranetes.pods.node.inventory import Inventory, Sandbox
from infranetes.pods.store.states import SandboxState
from infranetes.stats.gather import Figures, Gatherer
from infranetes_common.wire import control
from infranetes_common.wire.control_rpcs import ControlUsageRpcs
from txgrpc import Call

_MOST = (1 << 64) - 1


class UsageCalls(ControlUsageRpcs):
    """Answers with what pods use, as their VMs' agents say."""

    def __init__(self, inventory: Inventory, gatherer: Gatherer) -> None:
        self._inventory = inventory
        self._gatherer = gatherer

    async def ListUsage(self, request: control.ListUsageRequest, call: Call) -> control.ListUsageResponse:
        ready = [each for each in self._inventory if each.state is SandboxState.READY]
        figures = await self._gatherer.now(ready)
        return control.ListUsageResponse(pods=[_usage(each, figures.get(each.id)) for each in ready])


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
