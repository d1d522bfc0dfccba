# SPDX-License-Identifier: Apache-2.0
"""The gate before the agents of VMs that sleep: calls wait there until the VM is awake.

a VM       calls that need it (`NEEDS`)      all other calls
awake      pass, and are counted             pass
asleep     wake it, and wait until it is     wait until it is awake, or their own deadline

The others are the node's own, such as the streams of events and logs: they are not to wake anybody, and go on
once something else has. A connection that there is when the VM falls asleep is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import cast

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IProtocol, IProtocolFactory, IStreamClientEndpoint
from zope.interface import implementer

from infranetes_common.concurrency import Event, start
from infranetes_common.errors import InfranetesError
from txgrpc import GrpcError
from txgrpc.channel import ClientConnection
from txgrpc.metadata import Metadata
from txgrpc.observer import Observed, Observer
from txgrpc.service import Method

#: The calls that are made because somebody wants something of the pod.
NEEDS = frozenset(
    {
        "Attach",
        "CreateContainer",
        "Exec",
        "ExecSync",
        "PortForward",
        "RemoveContainer",
        "Shell",
        "StartContainer",
        "StopContainer",
        "UpdateContainer",
    }
)

_WHY = "its VM falls asleep"


class SleepGate:
    """The gate. Sandboxes are meant by their ids.

    :ivar on_need: called with a sandbox that sleeps when a call begins that needs it."""

    def __init__(self) -> None:
        self.on_need: Callable[[str], None] = lambda id: None
        self._closed: dict[str, Event[None]] = {}  # happens once the VM is awake, or could not be woken
        self._connected: dict[str, ClientConnection] = {}
        self._in_use: Counter[str] = Counter()
        self._used: Counter[str] = Counter()
        self._probing: Counter[str] = Counter()
        self._probed: Counter[str] = Counter()

    def close(self, id: str) -> None:
        """Let no call pass, and end those that are on their way. Idempotent."""
        self._closed.setdefault(id, Event())
        if (connection := self._connected.pop(id, None)) is not None:
            connection.abort(_WHY)

    def open(self, id: str) -> None:
        """Let all calls pass. Idempotent."""
        if (closed := self._closed.pop(id, None)) is not None:
            closed.succeed(None)

    def refuse(self, id: str, error: InfranetesError) -> None:
        """Fail the calls that wait now: the VM can't be woken for now. Later ones wait, or wake it."""
        if (closed := self._closed.get(id)) is not None:
            self._closed[id] = Event()
            closed.fail(error)

    def forget(self, id: str) -> None:
        """Forget a sandbox that is gone. Idempotent."""
        self.open(id)
        self._connected.pop(id, None)
        self._used.pop(id, None)
        self._probed.pop(id, None)

    def is_closed(self, id: str) -> bool:
        """Return whether calls wait."""
        return id in self._closed

    def in_use(self, id: str) -> bool:
        """Return whether a call is under way that needs the VM."""
        return self._in_use[id] > 0

    def in_demand(self, id: str) -> bool:
        """Return whether a call is under way that needs the VM, and is no probe."""
        return self._in_use[id] > self._probing[id]

    def uses(self, id: str) -> int:
        """Return how many calls have begun that needed the VM, without probes."""
        return self._used[id] - self._probed[id]

    def probes(self, id: str) -> tuple[int, int]:
        """Return how many probes have begun, and how many of them have not ended."""
        return self._probed[id], self._probing[id]

    @contextmanager
    def probe(self, id: str) -> Iterator[None]:
        """Count the one call within as a probe: it keeps no VM awake, though it wakes one that sleeps."""
        self._probing[id] += 1
        self._probed[id] += 1
        try:
            yield
        finally:
            self._probing[id] -= 1
            if not self._probing[id]:
                del self._probing[id]

    async def awake(self, id: str) -> None:
        """Wake the VM if it sleeps, and wait until it is awake.

        :raise InfranetesError: it could not be woken."""
        while (closed := self._closed.get(id)) is not None:
            self.on_need(id)
            await closed.wait()

    # ---- for clients of agents

    def endpoint(self, id: str, endpoint: IStreamClientEndpoint) -> IStreamClientEndpoint:
        """Return an endpoint that connects once the VM is awake."""
        return _GatedEndpoint(self, id, endpoint)

    def observer(self, id: str, inner: Observer) -> Observer:
        """Return an observer of the calls to one agent. :param inner: another one."""

        def observe(method: Method) -> Observed | None:
            observed = inner(method)
            if method.name not in NEEDS:
                return observed
            self._in_use[id] += 1
            self._used[id] += 1
            if id in self._closed:
                self.on_need(id)
            return _Use(self, id, observed)

        return observe

    def ended(self, id: str) -> None:
        """Note the end of a call that needed the VM."""
        self._in_use[id] -= 1
        if not self._in_use[id]:
            del self._in_use[id]

    async def connect(self, id: str, endpoint: IStreamClientEndpoint, factory: IProtocolFactory) -> IProtocol:
        """Connect once the VM is awake. :raise InfranetesError: it could not be woken."""
        if (closed := self._closed.get(id)) is not None:
            await closed.wait()
        protocol: IProtocol = await endpoint.connect(factory)
        connection = cast(ClientConnection, protocol)
        if id in self._closed:  # it has fallen asleep meanwhile, and hears no more
            connection.abort(_WHY)
        else:
            self._connected[id] = connection
        return protocol


@implementer(IStreamClientEndpoint)
class _GatedEndpoint:
    def __init__(self, gate: SleepGate, id: str, endpoint: IStreamClientEndpoint) -> None:
        self._gate = gate
        self._id = id
        self._endpoint = endpoint

    def connect(self, factory: IProtocolFactory) -> Deferred[IProtocol]:
        """See `IStreamClientEndpoint`."""
        return start(self._gate.connect(self._id, self._endpoint, factory))


class _Use:
    """A call that needs the VM."""

    def __init__(self, gate: SleepGate, id: str, inner: Observed | None) -> None:
        self._gate = gate
        self._id = id
        self._inner = inner

    @property
    def metadata(self) -> Iterable[tuple[str, str | bytes]]:
        return self._inner.metadata if self._inner is not None else ()

    def ended(self, error: GrpcError | None, trailing: Metadata) -> None:
        self._gate.ended(self._id)
        if self._inner is not None:
            self._inner.ended(error, trailing)
