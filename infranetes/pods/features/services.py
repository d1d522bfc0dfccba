# SPDX-License-Identifier: Apache-2.0
"""The rules of Kubernetes' Services in the sandboxes' VMs."""

from __future__ import annotations

from twisted.logger import Logger

from infranetes.pods.node.handler_config import CNI
from infranetes.pods.node.hooks import PodFeature
from infranetes.pods.node.inventory import Container, Sandbox
from infranetes.providers.annotations import wants_service_proxy

WAIT_SECONDS = 10.0  # for the API server's first answer; the waiting container may be the API server itself

_log = Logger()


class PodServices(PodFeature):
    """Keeps the service proxies in pods' VMs up to date.

    Those of pods that decline that have none, nor those of pods in the CNI's network, where the node's own
    proxy serves them. A pod without our agent can't decline: the node translates what comes from its VM."""

    name = "rules of Services"

    async def answered(self, sandbox: Sandbox) -> None:
        tell_of_services(sandbox)

    async def live(self, sandbox: Sandbox) -> None:
        tell_of_services(sandbox)  # a restarted daemon has not done so yet

    async def before_start(self, container: Container) -> None:
        """Wait until the VM has the rules, so that its pod's first connection finds them.

        If it has not within WAIT_SECONDS, log that: the container is started anyway."""
        sandbox = container.sandbox
        rules = sandbox.machine.rules
        if rules is None:
            return
        name = container.config.metadata.name
        with sandbox.timeline.step("the rules of Services are waited for", container=name):
            if not await sandbox.machine.has_rules(WAIT_SECONDS):
                _log.warn(
                    "a container of sandbox {sandbox} is started without all rules of Services in its VM: "
                    "{trouble}",
                    sandbox=sandbox.id,
                    pod=sandbox.pod,
                    trouble=rules.trouble or "the API server has not listed them yet",
                )


def tell_of_services(sandbox: Sandbox) -> None:
    """Keep the VM's service proxy up to date from now on, if it is to have one. Idempotent."""
    wanted = wants_service_proxy(sandbox.config.annotations) or not sandbox.machine.has_agent
    if sandbox.record.network != CNI and wanted:
        sandbox.machine.tell_of_services()
