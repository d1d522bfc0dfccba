# SPDX-License-Identifier: Apache-2.0
"""What a PodMachine is given to work with, and who keeps its record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime

from infranetes.authority import Authority
from infranetes.machines.agent.client import AgentClient, Connect
from infranetes.observer import Observer
from infranetes.providers.interface import Attachment, IPodProvider, Size
from infranetes.services.timing import Progress


class VmRecord(Protocol):
    """A record, of whatever else, that has a VM's facts among its fields."""

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
    """What is recorded of a VM."""

    id: str  # the id that the VM has in its tags and its certificate; a sandbox's, now or later
    token: str  # the provider's idempotency key
    instance_id: str = ""  # the provider's; "" until it has answered
    address: str = ""  # "" until the VM runs; so are the next two
    agent_host: str = ""
    agent_port: int = 0
    certificate_until: int = 0  # when its last certificate expires, nanoseconds since 1970; 0: not known
    certificate_key: str = ""  # the key that it is for, `authority.key_id`

    @staticmethod
    def of(record: VmRecord) -> VmFacts:
        """The facts that `record` has."""
        return VmFacts(**{field.name: getattr(record, field.name) for field in attrs.fields(VmFacts)})

    def put_into(self, record: _Record) -> _Record:
        """`record` with these facts."""
        # Any: attrs.evolve knows no type for the fields of a record that is any class
        evolve: Any = attrs.evolve  # Any: mypy knows it for attrs classes only
        changed: _Record = evolve(record, **attrs.asdict(self))
        return changed


class VmOwner(Protocol):
    """Owns a VM and keeps its record: a sandbox, or the pool."""

    @property
    def facts(self) -> VmFacts:
        """What the record has of the VM."""

    def note(self, facts: VmFacts) -> None:
        """Put the facts into the record in memory. The next write takes them to the disk."""

    def write(self, facts: VmFacts) -> Deferred[None]:
        """Put the facts into the record; fires once that is on the disk. For a VM that is no longer the
        owner's nothing is written."""


@attrs.frozen
class VmRequest:
    """What a VM is to be made like."""

    size: Size
    hostname: str = ""
    annotations: Mapping[str, str] = attrs.field(factory=dict)
    image: str = ""  # as `InstanceSpec.image`
    cgroup_parent: str = ""  # likewise
    attachment: Attachment | None = None  # likewise
    zone: str = ""  # likewise
    granted: frozenset[str] = frozenset()  # likewise


class MachineTimes(Protocol):
    """Seconds."""

    @property
    def launch(self) -> float:
        """From the request for a VM until its pod is ready."""

    @property
    def destroy(self) -> float:
        """The provider's part of ending a VM."""

    @property
    def certificate(self) -> float:
        """How long a certificate is valid."""


@attrs.frozen
class NodeNames:
    """Who this node is in the IaaS: its VMs are tagged with both."""

    cluster: str
    node: str


class RuleSender(Protocol):
    """Keeps the rules of Kubernetes' Services in one VM as they are in the cluster."""

    def start(self) -> None:
        """Begin."""

    def stop(self) -> None:
        """End. Idempotent."""

    @property
    def trouble(self) -> str:
        """Why the VM can't be told now; "": it can."""

    def progress(self) -> Progress:
        """How far the VM is."""

    async def when_told(self) -> None:
        """Return once the VM has all rules, or it is known that it takes none."""


class ServiceRules(Protocol):
    """The rules of the cluster's Services."""

    def sender(self, agent: AgentClient) -> RuleSender:
        """Return what brings them into the agent's VM."""

    def status(self) -> Mapping[str, object]:
        """What is known of them, for people."""


class MachineContext(Protocol):
    """The collaborators of a PodMachine."""

    @property
    def services(self) -> ServiceRules | None:
        """What its VM is told of Services; None: nothing."""

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
        """Whether the daemon is ending: what is under way is left to the next one."""

    def now(self) -> int:
        """Nanoseconds since 1970 UTC."""

    def check_ready(self) -> None:
        """:raise Unavailable: the provider has not started."""

    def note(self, write: Deferred[None], what: str) -> None:
        """Let a write go on by itself; a failure is logged."""

    async def release_address(self, id: str) -> None:
        """Take away what leads to the address of the VM with this id, which another VM may have next."""
