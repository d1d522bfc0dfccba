# SPDX-License-Identifier: Apache-2.0
"""Launching: from a spec to exactly one VM, whatever fails on the way."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Generic

import attrs
from twisted.internet.defer import Deferred, TimeoutError
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from infranetes.providers.annotations import PREFIX, Wishes, read, refuse_unknown
from infranetes.providers.cloud.calls.calls import Calls
from infranetes.providers.cloud.calls.translate import to_infranetes_error
from infranetes.providers.cloud.interface import (
    ADDRESS,
    CLUSTER,
    NODE,
    REFUSALS,
    SANDBOX,
    TOKEN,
    Action,
    Cloud,
    CloudError,
    CloudVM,
    D,
    ErrorKind,
    LaunchRequest,
)
from infranetes.providers.cloud.offers.sizes import Need, choose, need_of
from infranetes.providers.cloud.settings import CloudSettings
from infranetes.providers.cloud.vms.allowed import check_allowed
from infranetes.providers.cloud.vms.attempts import Attempts
from infranetes.providers.cloud.vms.ledger import Ledger
from infranetes.providers.interface import InstanceSpec, InstanceState, ProviderContext, Size
from infranetes_common.concurrency import sleep
from infranetes_common.errors import InfranetesError, InvalidArgument, Unavailable
from infranetes_common.identity import encode

_POLL_GROWTH = 1.5  # the growth of the pause between polls of a launch's operation
_MAX_NUMBERS = 4  # the most VMs of a token that are asked for, if each turns out to have ended

_log = Logger()


class Launcher(Generic[D]):
    """Launches VMs.

    :param waiting: makes lists show a VM's changes, as `Watcher.waiting`.
    :param launching: ids of VMs whose end is reported to nobody but the launch.
    :param unwanted: tokens of failed launches, each with the time until which VMs that turn up with it are
        destroyed.
    :param destroy: destroys a VM.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        cloud: Cloud[D],
        settings: CloudSettings,
        context: ProviderContext,
        calls: Calls[D],
        ledger: Ledger,
        waiting: Callable[[str], AbstractContextManager[Callable[[], Deferred[None]]]],
        launching: set[str],
        unwanted: dict[str, float],
        destroy: Callable[[CloudVM], Awaitable[None]],
    ) -> None:
        self._reactor = reactor
        self._cloud = cloud
        self._settings = settings
        self._context = context
        self._calls = calls
        self._ledger = ledger
        self._waiting = waiting
        self._launching = launching
        self._unwanted = unwanted
        self._destroy = destroy
        self.architecture = "x86_64"

    async def launch(self, spec: InstanceSpec) -> CloudVM:
        """Return the VM of the spec's token, which is launched if there is none.

        :raise CloudError, InfranetesError: it can't be launched, and nothing of it remains."""
        if (spec.cluster, spec.node) != (self._context.cluster, self._context.node):
            raise InvalidArgument(f"a VM for {spec.cluster}/{spec.node} can't be launched by this node")
        self._unwanted.pop(spec.token, None)
        existing = self._ledger.for_token(spec.token)
        if existing is not None:
            return existing
        request, attempts = self._request(spec)
        try:
            return self._ledger.record_launch(await self._launch(request, attempts))
        except (CloudError, InfranetesError) as error:
            await self._undo(request.token, error)
            raise

    def identity(self, spec: InstanceSpec) -> bytes:
        """Return the document for the agent.

        :raise InvalidArgument: an annotation has no such value."""
        names = read(spec.request.annotations).set_hostname
        return encode(
            attrs.evolve(
                spec.identity,
                listen=f"0.0.0.0:{self._settings.agent_port}",
                hostname=spec.identity.hostname if names else "",
            )
        )

    def need(self, size: Size, wishes: Wishes) -> Need:
        """Return what the VM of such a pod must have. :raise InvalidArgument: the pod's requests are not a
        valid size."""
        return need_of(
            size,
            wishes,
            allowed=self._settings.sizes,
            guest_memory=self._settings.guest_memory,
            min_memory=self._settings.min_memory,
            architecture=self.architecture,
        )

    def _request(self, spec: InstanceSpec) -> tuple[LaunchRequest, Attempts]:
        """Return the request, still without size and zone, and what to try.

        :raise InvalidArgument: an annotation or the size can't be served.
        :raise FailedPrecondition: no VM is launched in the zone that is asked for."""
        refuse_unknown(self._cloud.name, spec.request.annotations)
        wishes = read(spec.request.annotations)
        if wishes.disk:
            raise InvalidArgument(
                f"annotation {PREFIX}disk can't be served: the disk is as large as the configuration, or the "
                "machine image, says"
            )
        self._cloud.check_wishes(wishes)
        check_allowed(wishes, spec.request.granted, self._settings, self._cloud.name)
        offers = choose(self._cloud.offers, self.need(spec.request.size, wishes))
        if offers[0].gpus and not (wishes.image or spec.request.image):
            raise InvalidArgument(
                f"the VM would have {offers[0].gpus} GPUs ({offers[0].name}), which are expensive, and the "
                "image for pods of containers has no driver for them: name one that has by the annotation "
                f"{PREFIX}image, or run a pod whose image is the VM"
            )
        identity = self.identity(spec)
        tags = {
            CLUSTER: spec.cluster,
            NODE: self._context.owner,
            SANDBOX: spec.sandbox_id,
            TOKEN: spec.token,
            **({ADDRESS: wishes.elastic_address} if wishes.elastic_address else {}),
        }
        if spec.request.image and wishes.image:
            raise InvalidArgument(
                f"annotation {PREFIX}image: the image of the pod's container is the VM; leave it out"
            )
        request = LaunchRequest(
            token=spec.token,
            sandbox_id=spec.sandbox_id,
            number=self._ledger.count_destroyed(spec.token),
            tags=tags,
            identity=spec.request.guest.user_data if spec.request.guest else identity,
            agentless=spec.request.guest is not None,
            wishes=wishes,
            image=wishes.image or spec.request.image,
        )
        zones = self._cloud.zones(wishes, spec.request.zone)
        markets = [True, False] if wishes.spot and wishes.spot_fallback else [wishes.spot]
        return request, Attempts(offers, zones, markets, self._settings.max_sizes)

    async def _launch(self, request: LaunchRequest, attempts: Attempts) -> CloudVM:
        for number in range(request.number, request.number + _MAX_NUMBERS):
            vm = await self._launch_one(attrs.evolve(request, number=number), attempts)
            if vm.state is not InstanceState.ENDED:
                return vm
            if vm.id not in self._ledger.destroyed and number == request.number:
                return vm
        raise Unavailable(f"VMs of token {request.token} end as soon as they are launched; see {vm.detail}")

    async def _launch_one(self, request: LaunchRequest, attempts: Attempts) -> CloudVM:
        """Launch the cheapest size that a zone has, trying zones in their order."""
        for attempt in attempts:
            wishes = request.wishes if attempt.spot else attrs.evolve(request.wishes, spot=False)
            asked = attrs.evolve(request, size=attempt.size, zone=attempt.zone, wishes=wishes)
            try:
                vm = await self._calls.call(
                    f"launch a {attempt.size}",
                    partial(self._cloud._thd_launch, request=asked),
                    circuit="launch",
                    action=Action.LAUNCH,
                )
                if not vm.operation:
                    return vm
                # A VM that is refused from here on has used its id, so the next attempt needs another number.
                request = attrs.evolve(request, number=request.number + 1)
                self._launching.add(vm.id)
                try:
                    return await self._wait_for_operation(vm)
                finally:
                    self._launching.discard(vm.id)
            except CloudError as error:
                if error.kind is ErrorKind.CONFLICT:
                    return await self._find_launched(request.token, error)
                if error.kind not in REFUSALS:
                    raise
                attempts.refuse(attempt, error)
                self._calls.retried(Action.LAUNCH, error.kind)
                _log.info(
                    "{cloud} has no {spot}{size} {zone}: {error}",
                    cloud=self._cloud.location,
                    spot="spot " if attempt.spot else "",
                    size=attempt.size,
                    zone=attempt.zone,
                    error=error,
                )
        raise attempts.failure()

    async def _wait_for_operation(self, vm: CloudVM) -> CloudVM:
        """Wait until the launch's operation has ended, or a list shows that the VM runs, or `settle_seconds`
        are over: later failures show in lists.

        :raise CloudError: the VM is refused and does not exist."""
        deadline = self._reactor.seconds() + self._settings.settle_seconds
        what = f"see whether VM {vm.id} is available"
        pause = self._settings.poll_seconds
        listed = vm.operation_listed
        while vm.operation and (left := deadline - self._reactor.seconds()) > 0:
            running = await self._seen_running(vm.id, left if listed else pause, or_ended=listed)
            if running is not None:
                return running
            listed = False
            pause *= _POLL_GROWTH  # each poll asks for only one VM, which boots meanwhile
            try:
                vm = await self._calls.call(what, partial(self._cloud._thd_poll_launch, vm=vm))
            except CloudError as error:
                if error.kind in REFUSALS:
                    self._ledger.record_destroyed(vm.id, vm.token)
                raise
        return attrs.evolve(vm, operation="")

    async def _seen_running(self, id: str, seconds: float, *, or_ended: bool) -> CloudVM | None:
        """Wait for a list that shows that a VM runs, for `seconds` at most. Return the VM.

        :param or_ended: also stop waiting once a list shows that it has ended."""
        until = self._reactor.seconds() + seconds
        with self._waiting(id) as changed:
            while True:
                vm = self._ledger.last_said(id)  # perhaps since before the cloud answered the launch
                if vm is not None and vm.state is InstanceState.RUNNING:
                    return vm
                if vm is not None and or_ended and vm.state is InstanceState.ENDED:
                    return None
                left = until - self._reactor.seconds()
                if left <= 0:
                    return None
                with suppress(TimeoutError):
                    await changed().addTimeout(left, self._reactor)

    async def _find_launched(self, token: str, conflict: CloudError) -> CloudVM:
        """Find the VM that an earlier daemon launched with another identity, once the cloud shows it."""
        deadline = self._reactor.seconds() + self._settings.settle_seconds
        while True:
            vms = await self._calls.call("find a VM", partial(self._cloud._thd_find, token=token))
            existing = [vm for vm in vms if vm.id not in self._ledger.destroyed]
            if existing:
                return min(existing, key=lambda vm: (vm.state is InstanceState.ENDED, vm.created_at, vm.id))
            if self._reactor.seconds() > deadline:
                raise conflict
            await sleep(self._reactor, self._settings.poll_seconds)

    async def _undo(self, token: str, why: Exception) -> None:
        """Destroy what a failed launch left, now or when it turns up."""
        self._unwanted[token] = self._reactor.seconds() + self._settings.settle_seconds
        if isinstance(why, CloudError) and why.kind is ErrorKind.INVALID:
            return  # nothing was ever launched
        try:
            vms = await self._calls.call(
                "find what a failed launch left", partial(self._cloud._thd_find, token=token)
            )
            for vm in vms:
                await self._destroy(vm)
        except (CloudError, InfranetesError) as error:
            shown = (
                error
                if isinstance(error, InfranetesError)
                else to_infranetes_error(self._cloud.location, error)
            )
            _log.warn("a launch failed, and its leftovers are removed later: {error}", error=shown)
