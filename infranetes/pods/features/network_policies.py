# SPDX-License-Identifier: Apache-2.0
"""The firewalls of the sandboxes' VMs, computed from NetworkPolicies, enforced and kept up to date."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.pods.node.hooks import PodFeature
from infranetes.policies.interface import LocalPod, PodPolicies
from infranetes.providers.interface import IFirewallsPods
from infranetes_common.concurrency import Event, Notifier, backoff, sleep, start, within
from infranetes_common.errors import DeadlineExceeded, InfranetesError, NotFound, Unavailable
from infranetes_common.pod_firewall import PodFirewall

if TYPE_CHECKING:
    from infranetes.pods.node.inventory import Container, Sandbox
    from infranetes.pods.node.node_providers import NodeProvider
    from infranetes.pods.store.records import SandboxRecord

WAIT_SECONDS = 10.0  # the longest that a container's start waits; kubelet then retries it
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0  # seconds between two attempts

Ready = Callable[["Sandbox"], Event[None]]
"""Returns the event that happens when the firewall of a sandbox's VM can be set."""

NodeProviderOf = Callable[["SandboxRecord"], "NodeProvider"]
"""Returns the provider of a sandbox's VM."""

_log = Logger()


class Enforcer(Protocol):
    """Puts firewalls in force."""

    def enforce(self, sandbox: Sandbox, firewall: PodFirewall) -> Deferred[None]:
        """Put a firewall in force for a sandbox's VM. Idempotent."""

    def survives_reboot(self, sandbox: Sandbox) -> bool:
        """Return whether a firewall stays in force when the sandbox's VM reboots."""


class FirewallEnforcer:
    """Puts a firewall in force: outside of the sandbox's VM if the provider can do that, else inside.

    Where the pod has an address of the pods' network, the VM filters only the traffic through the VPC; the
    node filters the traffic through the tunnel."""

    def __init__(self, provider_of: NodeProviderOf) -> None:
        self._provider_of = provider_of

    def enforce(self, sandbox: Sandbox, firewall: PodFirewall) -> Deferred[None]:
        """Put a firewall in force. Idempotent."""
        provider = self._provider_of(sandbox.record).provider
        if IFirewallsPods.providedBy(provider):
            return cast(IFirewallsPods, provider).set_firewall(sandbox.record.instance_id, firewall)
        return start(self._enforce_inside(sandbox, firewall))

    def survives_reboot(self, sandbox: Sandbox) -> bool:
        """Return whether the sandbox's firewall is outside of its VM."""
        return IFirewallsPods.providedBy(self._provider_of(sandbox.record).provider)

    async def _enforce_inside(self, sandbox: Sandbox, firewall: PodFirewall) -> None:
        tunnel_port = await self._enforce_at_tunnel(sandbox, firewall)  # even if the VM can't be reached
        if sandbox.watch is not None:
            await sandbox.watch.when_live()
        if not tunnel_port:  # the VM may have joined the overlay meanwhile
            tunnel_port = await self._enforce_at_tunnel(sandbox, firewall)
        if sandbox.client is None:
            raise Unavailable(f"the agent of sandbox {sandbox.id} is no longer connected")
        await sandbox.client.set_firewall(firewall, tunnel_port)

    async def _enforce_at_tunnel(self, sandbox: Sandbox, firewall: PodFirewall) -> int:
        """Put the firewall in force at the node's end of the tunnel; return its port; 0: there is none."""
        overlay = self._provider_of(sandbox.record).overlay
        if overlay is None or not overlay.knows(sandbox.id):
            return 0
        await overlay.set_firewall(sandbox.id, firewall)
        return overlay.port


class PodFirewalls(PodFeature):
    """Keeps the firewalls of this node's sandboxes equal to what their NetworkPolicies demand."""

    name = "the rules of NetworkPolicies"

    def __init__(self, clock: IReactorTime, policies: PodPolicies, enforcer: Enforcer, ready: Ready) -> None:
        self._clock = clock
        self._policies = policies
        self._enforcer = enforcer
        self._ready = ready
        self._kept: dict[str, _Kept] = {}
        policies.subscribe(self._changed)

    def connected(self, sandbox: Sandbox) -> None:
        """Keep a sandbox's firewall up to date from now on."""
        if sandbox.id in self._kept:
            return
        metadata = sandbox.config.metadata
        self._policies.add(
            LocalPod(sandbox.id, metadata.namespace, metadata.name, metadata.uid, dict(sandbox.config.labels))
        )
        kept = self._kept[sandbox.id] = _Kept(sandbox)
        kept.working = start(self._work(kept))
        kept.working.addErrback(kept.ended)

    def disconnected(self, sandbox: Sandbox) -> None:
        """Stop keeping the sandbox's firewall. The one in force stays as long as the VM exists."""
        kept = self._kept.pop(sandbox.id, None)
        if kept is not None:
            self._policies.remove(sandbox.id)
            kept.over = True
            assert kept.working is not None
            kept.working.cancel()

    async def live(self, sandbox: Sandbox) -> None:
        """Put the firewall in force again if it is inside the VM, which may have rebooted."""
        kept = self._kept.get(sandbox.id)
        if kept is not None and not self._enforcer.survives_reboot(sandbox):
            kept.firewall = None
            kept.changed.notify()

    async def stop(self) -> None:
        """Forget all sandboxes."""
        for kept in list(self._kept.values()):
            self.disconnected(kept.sandbox)

    async def before_start(self, container: Container) -> None:
        """Wait until the pod's firewall is in force, at most WAIT_SECONDS.

        :raise Unavailable: it is not; the message says why."""
        sandbox, name = container.sandbox, container.config.metadata.name
        with sandbox.timeline.step("its NetworkPolicies are waited for", container=name):
            await self.wait(sandbox)

    async def wait(self, sandbox: Sandbox) -> None:
        """Wait until the sandbox's firewall is in force, at most WAIT_SECONDS.

        :raise Unavailable: it is not in force; the message says why."""
        kept = self._kept.get(sandbox.id)
        if kept is None:
            raise Unavailable(f"sandbox {sandbox.id} has no VM whose firewall could be in force")
        try:
            await within(self._clock, WAIT_SECONDS, kept.in_force.wait(), "the pod's firewall")
        except DeadlineExceeded:
            trouble = (
                kept.trouble or self._policies.trouble or "the API server has not listed all of them yet"
            )
            raise Unavailable(
                f"sandbox {sandbox.id}: none of its containers is started, as its NetworkPolicies are not "
                f"in force: {trouble}"
            ) from None

    def in_force(self, id: str) -> PodFirewall | None:
        """Return the firewall that this daemon last put in force for a sandbox, or None."""
        kept = self._kept.get(id)
        return kept.firewall if kept is not None else None

    def trouble(self, id: str) -> str:
        """Return why the last attempt to put a sandbox's firewall in force failed, or "" if it did not."""
        kept = self._kept.get(id)
        return kept.trouble if kept is not None else ""

    def _changed(self, ids: frozenset[str]) -> None:
        for id in ids & self._kept.keys():
            self._kept[id].changed.notify()

    async def _work(self, kept: _Kept) -> None:
        await self._ready(kept.sandbox).wait()
        pauses = backoff(FIRST_PAUSE, LONGEST_PAUSE)
        while True:
            wanted = self._policies.firewall(kept.sandbox.id)
            if wanted is None or wanted == kept.firewall:
                await kept.changed.wait()
                continue
            try:
                await self._enforcer.enforce(kept.sandbox, wanted)
            except NotFound as error:  # the VM has ended; the reconciler notices that
                kept.trouble = str(error)
            except InfranetesError as error:
                kept.trouble = str(error)
                _log.warn(
                    "sandbox {sandbox}: a change of its NetworkPolicies is not in force yet: {error}",
                    sandbox=kept.sandbox.id,
                    pod=kept.sandbox.pod,
                    error=kept.trouble,
                )
            else:
                kept.firewall, kept.trouble = wanted, ""
                kept.in_force.succeed(None)
                pauses = backoff(FIRST_PAUSE, LONGEST_PAUSE)
                continue
            await sleep(self._clock, next(pauses))


class _Kept:
    """A sandbox whose firewall is kept.

    :ivar firewall: the firewall in force; None: not known. :ivar in_force: happens when one is in force for
        the first time. :ivar trouble: why the last attempt failed; "": it did not.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.changed = Notifier()
        self.in_force: Event[None] = Event()
        self.firewall: PodFirewall | None = None
        self.working: Deferred[None] | None = None
        self.trouble = ""
        self.over = False

    def ended(self, failure: Failure) -> None:
        """Log an unexpected end of the work."""
        if not self.over:
            _log.failure(
                "the firewall of sandbox {sandbox} is no longer updated",
                failure=failure,
                sandbox=self.sandbox.id,
            )
