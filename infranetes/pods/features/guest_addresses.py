# SPDX-License-Identifier: Apache-2.0
"""Guests that never ask for their address: such a pod runs, and nobody reaches it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.pods.node.handlers import Handler
from infranetes.pods.node.hooks import PodFeature
from infranetes.pods.node.inventory import Container, Sandbox
from infranetes.pods.store.records import SandboxRecord
from infranetes.pods.store.states import SandboxState
from infranetes.providers import machine_annotations
from infranetes.providers.hypervisor import GuestState, IBootsImages, IHypervisor
from infranetes.providers.machine_annotations import NetworkConfig
from infranetes_common.concurrency import start
from infranetes_common.errors import InfranetesError
from infranetes_common.redaction import redacted_end
from infranetes_common.wire import cri

PATIENCE_SECONDS = 180.0  # for a guest that boots
_LINE_BYTES = 300  # of the console's end that are told

_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]")  # of a terminal

_log = Logger()


class AddressReporter(Protocol):
    """The reporter of pods' events to Kubernetes: `infranetes.kubernetes.pod_events.PodEvents`."""

    def unaddressed(self, pod: cri.PodSandboxMetadata, message: str) -> None:
        """Report that the guest of a pod's sandbox does not ask for its address."""


class GuestAddresses(PodFeature):
    """Looks at each guest some time after it was started, and tells if it has not asked for its address.

    :param handler_of: returns a sandbox's handler. :param reporter: None: nobody but the log is told."""

    name = "guests' addresses"

    def __init__(
        self,
        clock: IReactorTime,
        handler_of: Callable[[SandboxRecord], Handler],
        reporter: AddressReporter | None = None,
    ) -> None:
        self._clock = clock
        self._handler_of = handler_of
        self._reporter = reporter
        self._looks: dict[str, IDelayedCall] = {}  # by sandbox

    async def before_start(self, container: Container) -> None:
        """Look later, if the guest is to ask by DHCP."""
        sandbox = container.sandbox
        if sandbox.record.image and self._asks(sandbox):
            self.disconnected(sandbox)
            self._looks[sandbox.id] = self._clock.callLater(PATIENCE_SECONDS, self._due, sandbox)

    def disconnected(self, sandbox: Sandbox) -> None:
        """Look no more at a guest that is gone."""
        look = self._looks.pop(sandbox.id, None)
        if look is not None and look.active():
            look.cancel()

    async def stop(self) -> None:
        """Look at none any more."""
        for look in self._looks.values():
            if look.active():
                look.cancel()
        self._looks.clear()

    def _asks(self, sandbox: Sandbox) -> bool:
        handler = self._handler_of(sandbox.record)
        if not IBootsImages.providedBy(handler.node_provider.provider):
            return False
        choices = machine_annotations.read(handler.vm_annotations(sandbox.config.annotations))
        return choices.guest.network_config is NetworkConfig.DHCP

    def _due(self, sandbox: Sandbox) -> None:
        self._looks.pop(sandbox.id, None)
        start(self._look(sandbox)).addErrback(_unexpected)

    async def _look(self, sandbox: Sandbox) -> None:
        provider = self._handler_of(sandbox.record).node_provider.provider
        if sandbox.state is not SandboxState.READY or not IBootsImages.providedBy(provider):
            return
        try:
            hypervisor: IHypervisor = provider.hypervisor(sandbox.record.instance_id)
            if hypervisor.has_address() is not False:
                return
            if (await hypervisor.status()).state is not GuestState.RUNNING:
                return
            last = await _last_line(hypervisor)
        except InfranetesError as error:
            _log.debug("whether the guest of {sandbox} has its address is not known: {error}",
                       sandbox=sandbox.id, error=error)  # fmt: skip
            return
        message = (
            f"the guest has not asked for its address {sandbox.record.address} within "
            f"{PATIENCE_SECONDS:.0f} s: have it use DHCP on its network card, or set "
            f"infranetes.io/network-config to static{f'; its console ends with: {last}' if last else ''}"
        )
        _log.warn("sandbox {sandbox}: {message}", sandbox=sandbox.id, pod=sandbox.pod, message=message)
        sandbox.timeline.note("the guest has no address", error=message)
        if self._reporter is not None:
            self._reporter.unaddressed(sandbox.config.metadata, message)


async def _last_line(hypervisor: IHypervisor) -> str:
    console = hypervisor.console
    begin = max(console.begin, console.end - _LINE_BYTES)
    said = (await console.read(begin, _LINE_BYTES)).decode("utf-8", "replace")
    lines = ["".join(filter(str.isprintable, line)).strip() for line in _CONTROLS.sub("", said).splitlines()]
    return redacted_end(next((line for line in reversed(lines) if line), ""), _LINE_BYTES)


def _unexpected(failure: Failure) -> None:
    _log.failure("looking for a guest's address failed", failure)
