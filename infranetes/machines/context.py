# SPDX-License-Identifier: Apache-2.0
"""The collaborators of a PodMachine, the owner of its record, and the facts recorded of its VM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime

from infranetes.identity.authority import Authority
from infranetes.machines.interface import Connect, IAgent
from infranetes.observer import Observer
from infranetes.providers.interface import IPodProvider
from infranetes.services.timing import RuleProgress
from infranetes_common.wire import vmserver


class VmRecord(Protocol):
    """A record that has a VM's facts among its fields."""

    @property
    def id(self) -> str: ...
    @property
    def token(self) -> str: ...
    @property
    def instance_id(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def agent_host(self) -> str: ...
    @property
    def agent_port(self) -> int: ...
    @property
    def certificate_until(self) -> int: ...
    @property
    def certificate_key(self) -> str: ...


_Record = TypeVar("_Record", bound=VmRecord)


@attrs.frozen
class VmFacts:
    """The facts recorded of a VM."""

    id: str  # the id in the VM's tags and certificate: that of its present or later sandbox
    token: str  # the provider's idempotency key
    instance_id: str = ""  # the provider's id of the VM; "" until it has answered
    address: str = ""  # not set until the VM runs, like the next two
    agent_host: str = ""
    agent_port: int = 0
    certificate_until: int = 0  # when its last certificate expires, nanoseconds since 1970; 0: not known
    certificate_key: str = ""  # the id of the certificate's key, `authority.key_id`

    @staticmethod
    def of(record: VmRecord) -> VmFacts:
        """Return the facts in `record`."""
        return VmFacts(**{field.name: getattr(record, field.name) for field in attrs.fields(VmFacts)})

    def put_into(self, record: _Record) -> _Record:
        """Return `record` with these facts."""
        evolve: Any = attrs.evolve  # Any: mypy types it for attrs classes only
        changed: _Record = evolve(record, **attrs.asdict(self))
        return changed


class VmOwner(Protocol):
    """The owner of a VM, which keeps its record: a sandbox or the pool."""

    @property
    def facts(self) -> VmFacts:
        """The facts in the VM's record."""

    def note(self, facts: VmFacts) -> None:
        """Put the facts into the record in memory. They reach the disk with the next write."""

    def write(self, facts: VmFacts) -> Deferred[None]:
        """Put the facts into the record.

        Fires once it is on the disk; at once, without a write, if the VM is no longer the owner's."""


class MachineTimes(Protocol):
    """Time limits of a PodMachine, in seconds."""

    @property
    def launch(self) -> float:
        """The time from the request for a VM until its pod is ready."""

    @property
    def destroy(self) -> float:
        """The time for the provider to destroy a VM."""

    @property
    def certificate(self) -> float:
        """The validity of a certificate."""


@attrs.frozen
class NodeNames:
    """The node's names in the IaaS, with which its VMs are tagged."""

    cluster: str
    node: str


class RuleSender(Protocol):
    """The sender that keeps the rules of Kubernetes' Services in one VM up to date."""

    def start(self) -> None:
        """Begin to send."""

    def stop(self) -> None:
        """Stop sending. Idempotent."""

    @property
    def trouble(self) -> str:
        """Why rules can't be sent to the VM now; "": they can be."""

    def progress(self) -> RuleProgress:
        """Return how far the VM is."""

    async def when_told(self) -> None:
        """Wait until the VM has all rules, or is known to take none."""


class ServiceRules(Protocol):
    """The rules of the cluster's Services."""

    def sender(self, agent: IAgent) -> RuleSender:
        """Return a sender of the rules to the agent's VM."""

    def status(self) -> Mapping[str, object]:
        """Return the state of the rules, for Status."""


class NodeServices(Protocol):
    """The node's own service proxy, for all VMs on a bridge that have none; the node starts and stops it."""

    @property
    def rules(self) -> RuleSender | None:
        """What sends it the rules; None: there are none."""

    async def service_report(
        self, key: vmserver.ServiceKey | None, seconds: float
    ) -> vmserver.ServiceReportResponse:
        """Ask for its state. See `IServiceAgent.service_report`."""


class MachineContext(Protocol):
    """The collaborators of a PodMachine."""

    @property
    def services(self) -> ServiceRules | None:
        """The rules of Services to send to the VM; None: do not send any."""

    @property
    def node_services(self) -> NodeServices | None:
        """What serves VMs without our agent; None: nothing does."""

    @property
    def clock(self) -> IReactorTime: ...
    @property
    def observer(self) -> Observer: ...
    @property
    def provider(self) -> IPodProvider: ...
    @property
    def authority(self) -> Authority: ...
    @property
    def connect(self) -> Connect: ...
    @property
    def names(self) -> NodeNames: ...
    @property
    def times(self) -> MachineTimes: ...

    @property
    def stopping(self) -> bool:
        """Whether the daemon is stopping, and leaves unfinished work to the next one."""

    def now(self) -> int:
        """Return the time in nanoseconds since 1970 UTC."""

    def check_ready(self) -> None:
        """Check that the provider has started. :raise Unavailable: it has not."""

    def note(self, write: Deferred[None], what: str) -> None:
        """Let a write finish in the background and log its failure."""

    async def release_address(self, id: str) -> None:
        """Remove host ports and tunnels of the VM with this id: its address may become another VM's."""
