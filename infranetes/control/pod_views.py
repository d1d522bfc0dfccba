# SPDX-License-Identifier: Apache-2.0
"""What the pages of pods show: the answers of the control socket, put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from infranetes.control.describe import DescribeCalls
from infranetes.control.policies import PolicyCalls
from infranetes.control.service import ControlService
from infranetes.monitoring.pod_view import Mount, PodView, Volume
from infranetes.pods.node.inventory import Inventory, Sandbox
from infranetes.pods.store.records import AttachmentRecord
from infranetes_common.errors import InfranetesError
from infranetes_common.wire import control
from txgrpc import Call

MAX_EVENTS = 50
MAX_MOUNTS = 100
_NO_CALL = cast(Call, None)  # the calls of the control socket that are used here do not look at theirs
_NOT_FOR_ALL = (
    "A console may show anything, so that it is here only where metrics.token_file is set. "
    "`infranetes-ctl console` shows it."
)


class PodViews:
    """See `LooksAtPods`. :param attachments: returns the records of a sandbox's volumes."""

    def __init__(
        self,
        inventory: Inventory,
        pods: ControlService,
        description: DescribeCalls,
        policies: PolicyCalls,
        attachments: Callable[[str], Sequence[AttachmentRecord]],
    ) -> None:
        self._inventory = inventory
        self._pods = pods
        self._description = description
        self._policies = policies
        self._attachments = attachments

    async def look(self, pod: str, *, console: bool) -> PodView:
        """Return what is seen of a pod."""
        described = await self._description.describe(pod, ask=False)
        id = described.pod.id
        text, no_console = await self._console(id) if console else ("", _NOT_FOR_ALL)
        policies, no_policies = await self._holding(id)
        sandbox = self._inventory.sandboxes.get(id)
        return PodView(
            described,
            self._description.newest_events(id, MAX_EVENTS),
            tuple(
                Volume(attachment.id, attachment.provider, attachment.serial)
                for attachment in self._attachments(id)
            ),
            _mounts(sandbox) if sandbox is not None else (),
            text,
            no_console,
            policies,
            no_policies,
        )

    async def _console(self, id: str) -> tuple[str, str]:
        """Return what is on its console, and why there is nothing."""
        try:
            answer = await self._pods.GetConsole(control.GetConsoleRequest(sandbox=id), _NO_CALL)
        except InfranetesError as error:
            return "", str(error)
        return answer.text, ""

    async def _holding(self, id: str) -> tuple[control.PodPolicies | None, str]:
        """Return what holds for it, and why nothing is known."""
        try:
            answer = await self._policies.GetPolicies(control.GetPoliciesRequest(pod=id), _NO_CALL)
        except InfranetesError as error:
            return None, str(error)
        if not answer.enabled:
            return None, "NetworkPolicies do not hold on this node: kubernetes.network_policies is off."
        return answer.pods[0], ""


def _mounts(sandbox: Sandbox) -> Sequence[Mount]:
    mounts = (
        Mount(container.config.metadata.name, mount.container_path, mount.host_path, mount.readonly)
        for container in sandbox.containers.values()
        for mount in container.config.mounts
    )
    return tuple(mounts)[:MAX_MOUNTS]
