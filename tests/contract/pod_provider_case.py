# SPDX-License-Identifier: Apache-2.0
"""The test case of the suites for pod providers: hooks for a provider, and helpers."""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from twisted.internet.defer import Deferred
from twisted.internet.endpoints import wrapClientTLS
from twisted.internet.error import ProcessTerminated
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.internet.protocol import ProcessProtocol
from twisted.internet.task import deferLater
from twisted.python.failure import Failure
from twisted.trial.unittest import TestCase

from infranetes.identity.authority import Authority
from infranetes.machines.agent.marked import marked_endpoint
from infranetes.providers import registry
from infranetes.providers.interface import (
    Instance,
    InstanceSpec,
    InstanceState,
    IPodProvider,
    IReachesAgents,
    ProviderContext,
    Size,
    VmRequest,
)
from infranetes_common.concurrency import start
from infranetes_common.identity import Identity
from infranetes_common.reactors import installed
from infranetes_common.wire import vmserver
from infranetes_common.wire.vmserver_rpcs import AgentStub
from txgrpc import Channel, GrpcError

reactor = installed()

T = TypeVar("T")
LEFT_SECONDS = 10.0  # that what a VM held may still be there after its end

if TYPE_CHECKING:
    _Base = TestCase
else:
    _Base = object


class ProviderCase(_Base):
    """A provider with a state directory of its own, which leaves nothing behind."""

    provider_name: ClassVar[str]
    pod_cidr: ClassVar[str] = "10.213.0.0/24"
    other_cidr: ClassVar[str] = "10.214.0.0/24"
    start_timeout: ClassVar[float] = 30.0  # seconds for `start`, including what it builds
    boot_timeout: ClassVar[float] = 30.0  # from launch to RUNNING
    agent_timeout: ClassVar[float] = 30.0  # from RUNNING to the agent's first answer
    call_timeout: ClassVar[float] = 30.0  # for each other call
    notice_timeout: ClassVar[float] = 30.0  # until the end of a VM is noticed
    interrupt_after: ClassVar[tuple[float, ...]] = (0.0, 0.05, 0.5)  # seconds into a launch
    too_big: ClassVar[Size] = Size(cpu_millis=10**9, memory_bytes=2**60)
    timeout = 600.0  # of one test

    # Hooks.

    def table(self) -> Mapping[str, object]:
        """The provider's table of the configuration."""
        raise NotImplementedError

    def end_from_outside(self, instance: Instance) -> Awaitable[None]:
        """Make the VM stop executing as a crash would, behind the provider's back."""
        raise NotImplementedError

    def break_launches(self) -> Callable[[], None]:
        """Make each launch of providers made from now on fail late, when all resources of the VM are taken.

        `start` still works. Return a function that undoes it.
        """
        raise NotImplementedError

    def leftovers(self) -> Awaitable[list[str]] | list[str]:
        """Describe what VMs still hold outside of this process: processes, interfaces, leases, disks.

        This is called once all VMs are destroyed and all providers stopped.
        """
        raise NotImplementedError

    def finish(self) -> Awaitable[None] | None:
        """Remove what the test itself has set up. This is called last."""
        return None

    # Helpers.

    def setUp(self) -> Any:
        self.state_dir = Path(self.mktemp()).absolute()
        self.state_dir.mkdir(mode=0o700, parents=True)
        self.run_dir = Path(tempfile.mkdtemp(prefix="infranetes-"))  # short: sockets go into it
        self.authority = Authority(self.mktemp())
        self.providers: list[IPodProvider] = []
        self.channels: list[Channel] = []
        self._private_channels: dict[str, Channel] = {}  # by instance: each takes one connection at a time

    def tearDown(self) -> Deferred[None]:
        return start(self.clean_up())

    async def end_all(self) -> None:
        """Destroy the VMs that are left, by another provider."""
        provider = self.make_provider()  # without a subnet, as the VMs may have any
        await self.within(provider.start(lambda words: None), self.start_timeout)
        for instance in await self.within(provider.list()):
            await self.within(provider.destroy(instance.id))
        self.assertEqual(await self.within(provider.list()), [])
        await provider.stop()

    async def left(self) -> list[str]:
        """Return `leftovers`."""
        left = self.leftovers()
        return left if isinstance(left, list) else await left

    async def clean_up(self) -> None:
        """Destroy the VMs that are left, then prove that nothing is left of them."""
        try:
            for channel in self.channels:
                await channel.close()
            for provider in self.providers:
                await provider.stop()
            deadline = time.monotonic() + LEFT_SECONDS
            await self.end_all()
            while (left := await self.left()) and time.monotonic() < deadline:
                # A request of a daemon that was killed may be carried out after the next one has looked.
                await self.end_all()
            self.assertEqual(left, [])
        finally:
            finished = self.finish()
            if finished is not None:
                await finished
            shutil.rmtree(self.run_dir)  # not an addCleanup: trial runs those before tearDown

    cluster: ClassVar[str] = "contract"
    node: ClassVar[str] = "node-1"

    def context(self, cluster: str | None = None, node: str | None = None) -> ProviderContext:
        return ProviderContext(self.state_dir, self.run_dir, cluster or self.cluster, node or self.node)

    def make_provider(self, cluster: str | None = None, node: str | None = None) -> IPodProvider:
        """Return a provider, not started, on this test's state."""
        provider = registry.create(reactor, self.provider_name, self.table(), self.context(cluster, node))
        self.providers.append(provider)
        return provider

    async def started(
        self, cluster: str | None = None, node: str | None = None, pod_cidr: str | None = None
    ) -> IPodProvider:
        provider = self.make_provider(cluster, node)
        await self.within(provider.configure_network(pod_cidr or self.pod_cidr))
        await self.within(provider.start(lambda words: None), self.start_timeout)
        return provider

    async def restarted(self, provider: IPodProvider) -> IPodProvider:
        """Stop a provider and start the next daemon's."""
        await self.within(provider.stop())
        return await self.started()

    def spec(
        self, *, token: str | None = None, cluster: str = "", node: str = "", **asked: Any
    ) -> InstanceSpec:
        """Return the specification of a new VM. :param asked: fields of its request."""
        sandbox_id = secrets.token_hex(16)
        certificate, key = self.authority.issue_vm(sandbox_id, 3600)
        identity = Identity(
            sandbox_id=sandbox_id,
            certificate_pem=certificate,
            key_pem=key,
            ca_pem=self.authority.ca_pem,
            hostname="pod",
            machine_id=secrets.token_hex(16),
            entropy=secrets.token_hex(32),
            now_nanos=time.time_ns(),
        )
        return InstanceSpec(
            secrets.token_hex(16) if token is None else token,
            sandbox_id,
            cluster or self.cluster,
            node or self.node,
            identity,
            VmRequest(hostname="pod", **asked),
        )

    async def running(self, provider: IPodProvider, spec: InstanceSpec) -> Instance:
        launched = await self.within(provider.launch(spec))
        waiting = provider.wait_running(launched.id, self.boot_timeout)
        instance = await self.within(waiting, self.boot_timeout + 5)
        self.assertIs(instance.state, InstanceState.RUNNING)
        return instance

    def within(self, waiting: Deferred[T], seconds: float | None = None) -> Deferred[T]:
        """Bound `waiting` by `seconds`; by default `call_timeout`."""
        return waiting.addTimeout(seconds or self.call_timeout, reactor)

    def sleep(self, seconds: float) -> Deferred[None]:
        return deferLater(reactor, seconds, lambda: None)

    async def until(self, holds: Callable[[], object], what: str, seconds: float | None = None) -> None:
        deadline = reactor.seconds() + (seconds or self.notice_timeout)
        while not holds():
            if reactor.seconds() > deadline:
                self.fail(f"not in time: {what}")
            await self.sleep(0.05)

    def agent(self, instance: Instance, sandbox_id: str | None = None) -> AgentStub:
        """Return a stub of the VM's agent, whose certificate must be for `sandbox_id`, if it shows one."""
        return AgentStub(self.channel(instance, sandbox_id))

    def channel(self, instance: Instance, sandbox_id: str | None = None) -> Channel:
        """Return a channel to the VM's agent, likewise; it may be the one that there is."""
        endpoint = self.private_endpoint(instance)
        if endpoint is not None and (known := self._private_channels.get(instance.id)) is not None:
            return known
        channel = Channel(
            reactor,
            endpoint
            or wrapClientTLS(
                self.authority.client_options(sandbox_id or instance.sandbox_id),
                marked_endpoint(reactor, instance.agent_host, instance.agent_port, 30.0),
            ),
        )
        self.channels.append(channel)
        if endpoint is not None:
            self._private_channels[instance.id] = channel
        return channel

    def private_endpoint(self, instance: Instance) -> IStreamClientEndpoint | None:
        """Return what alone leads to the VM's agent; None: its address does, by TLS."""
        provider = self.providers[-1]
        if not IReachesAgents.providedBy(provider):
            return None
        return cast(IReachesAgents, provider).agent_endpoint(instance.id)

    async def agent_info(self, instance: Instance) -> vmserver.InfoResponse:
        """Call the agent's Info until it answers, and return the answer."""
        stub = self.agent(instance)
        deadline = reactor.seconds() + self.agent_timeout
        while True:
            try:
                info: vmserver.InfoResponse = await stub.Info(vmserver.InfoRequest(), timeout=5.0)
                return info
            except GrpcError:
                if reactor.seconds() > deadline:
                    raise
                await self.sleep(0.1)

    async def assert_silent(self, instance: Instance) -> None:
        """Wait until the VM's agent answers no more, as clouds end VMs after they have said that they do."""
        stub = self.agent(instance)
        deadline = reactor.seconds() + self.notice_timeout
        while reactor.seconds() < deadline:
            try:
                await stub.Info(vmserver.InfoRequest(), timeout=2.0)
            except GrpcError:
                return
            await self.sleep(0.1)
        self.fail(f"the agent of VM {instance.id} still answers")

    async def refused(
        self, error: type[Exception], waiting: Deferred[Any]
    ) -> Exception:  # Any: a result that does not come
        """Assert that `waiting` fails with this error and a message longer than ten characters. Return it."""
        raised = await self.assertFailure(self.within(waiting), error)
        self.assertGreater(len(str(raised)), 10, f"{error.__name__} says too little: {raised}")
        assert isinstance(raised, Exception)
        return raised


class DyingDaemon(ProcessProtocol):
    """A child process: its output, and the signal that ended it."""

    def __init__(self) -> None:
        self.ended: Deferred[None] = Deferred()
        self.output = b""
        self.signal: int | None = None

    def outReceived(self, data: bytes) -> None:
        self.output += data

    def errReceived(self, data: bytes) -> None:
        self.output += data

    def processEnded(self, reason: Failure) -> None:
        ended = reason.value
        self.signal = ended.signal if isinstance(ended, ProcessTerminated) else None
        self.ended.callback(None)

    def kill(self) -> None:
        if not self.ended.called:
            self.transport.signalProcess("KILL")  # type: ignore[union-attr]
