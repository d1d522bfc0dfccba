# SPDX-License-Identifier: Apache-2.0
"""The calls about the VM itself: its facts, its certificate, its sandbox's settings."""

from __future__ import annotations

import os
import time

from infranetes_common import __version__
from infranetes_common.concurrency import Flight
from infranetes_common.errors import FailedPrecondition
from infranetes_common.reactors import IReactor
from infranetes_common.user_namespaces import user_namespace
from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages
from infranetes_common.wire.vmserver_rpcs import AgentMachineRpcs
from txgrpc import Call
from vmserver.containers.interface import IHasUserNamespaces, ITakesLayers
from vmserver.containers.provider_choice import ProviderChoice
from vmserver.identity.current import CurrentIdentity
from vmserver.identity.metadata import MetadataGate
from vmserver.keeping.holding import Holding
from vmserver.machine.huge_pages import huge_page_sizes
from vmserver.machine.timekeeping import Timekeeping
from vmserver.pod_settings import PodSettings
from vmserver.prewarm import warm_up

_MACHINE = "machine"  # the ContainerProvider of VMs whose image is the pod


class MachineCalls(AgentMachineRpcs):
    """Answers for the VM.

    :param timekeeping: None: the machine is shared, and its clock is left alone.
    :ivar holding: whether its containers are held; None: the machine is shared."""

    def __init__(
        self,
        reactor: IReactor,
        choice: ProviderChoice,
        settings: PodSettings,
        identity: CurrentIdentity,
        gate: MetadataGate,
        timekeeping: Timekeeping | None,
        *,
        own_machine: bool,
    ) -> None:
        self._reactor = reactor
        self._choice = choice
        self._settings = settings
        self._identity = identity
        self._gate = gate
        self._timekeeping = timekeeping
        self._own_machine = own_machine
        self.holding: Holding | None = None
        self._warming: Flight[None] | None = None

    async def Info(self, request: messages.InfoRequest, call: Call) -> messages.InfoResponse:
        return messages.InfoResponse(
            version=__version__,
            container_provider=self._choice.provider.name,
            boot_id=self._identity.boot_id,
            agent_id=self._identity.agent_id,
            sandbox_id=self._identity.sandbox_id,
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            cpus=os.cpu_count() or 1,
            now_nanos=time.time_ns(),
            takes_layers=ITakesLayers.providedBy(self._choice.provider),
            steady_nanos=self._timekeeping.reading() if self._timekeeping is not None else 0,
            huge_page_sizes=huge_page_sizes() if self._own_machine else [],
            held=self.holding is not None and self.holding.held,
        )

    async def NewKey(self, request: messages.NewKeyRequest, call: Call) -> messages.NewKeyResponse:
        return messages.NewKeyResponse(request=self._identity.request_certificate())

    async def Rekey(self, request: messages.RekeyRequest, call: Call) -> messages.RekeyResponse:
        await self._identity.renew(request.certificate)
        return messages.RekeyResponse()

    async def ConfigureSandbox(
        self, request: messages.ConfigureSandboxRequest, call: Call
    ) -> messages.ConfigureSandboxResponse:
        provider = request.container_provider or self._choice.provider.name
        self._settings.apply(request.config, request.node_dns, containers=provider != _MACHINE)
        await self._gate.configure(request.config.annotations)
        await self._choice.choose(request.container_provider)
        self._check_user_namespace(request.config)
        await self._choice.provider.configure(request.config)
        return messages.ConfigureSandboxResponse()

    async def WarmUp(self, request: messages.WarmUpRequest, call: Call) -> messages.WarmUpResponse:
        if self._warming is None or self._warming.done:
            self._warming = Flight(self._warm_up())
        await self._warming.join()
        return messages.WarmUpResponse()

    async def _warm_up(self) -> None:
        if await self._choice.provider.containers():
            raise FailedPrecondition("the machine has containers; one is run beforehand where there are none")
        await warm_up(self._reactor, self._choice.provider)

    def _check_user_namespace(self, config: cri.PodSandboxConfig) -> None:
        users = user_namespace(config.linux.security_context.namespace_options, "config")
        provider = self._choice.provider
        if users is not None and not IHasUserNamespaces.providedBy(provider):
            raise FailedPrecondition(
                f"config.userns_options: the VM's provider {provider.name} has no user namespaces; choose "
                "the provider oci, or leave hostUsers: false out"
            )
