# SPDX-License-Identifier: Apache-2.0
"""The rules of Kubernetes' Services in the sandboxes' VMs."""

from __future__ import annotations

from twisted.logger import Logger

from infranetes.pods.node.context import NodeContext
from infranetes.pods.node.handler_config import CNI
from infranetes.pods.node.inventory import Sandbox
from infranetes.providers.annotations import wants_service_proxy

WAIT_SECONDS = 10.0  # for the API server's first answer; the waiting container may be the API server itself

_log = Logger()


def tell_of_services(sandbox: Sandbox) -> None:
    """Keep the VM's service proxy up to date, unless its pod declines that or is in the CNI's network, where
    the node's own proxy serves it. Idempotent."""
    if sandbox.record.network != CNI and wants_service_proxy(sandbox.config.annotations):
        sandbox.machine.tell_of_services()


async def wait_for_rules(node: NodeContext, sandbox: Sandbox) -> None:
    """Wait at most WAIT_SECONDS until the VM has the rules, so that its pod's first connection finds them.

    If it has not, log that: the container is started anyway."""
    rules = sandbox.machine.rules
    if rules is not None and not await sandbox.machine.has_rules(WAIT_SECONDS):
        _log.warn(
            "a container of sandbox {sandbox} is started without all rules of Services in its VM: {trouble}",
            sandbox=sandbox.id,
            pod=sandbox.pod,
            trouble=rules.trouble or "the API server has not listed them yet",
        )
