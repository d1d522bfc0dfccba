# SPDX-License-Identifier: Apache-2.0
"""The cloud's notice that it will take this machine away, as it does with spot instances.

=====  ==============================================================================================
cloud  how its metadata service announces the end
=====  ==============================================================================================
aws    `spot/instance-action` appears two minutes before: {"action": ..., "time": ...} (source: Amazon
       EC2 user guide, "Spot Instance interruption notices")
azure  `scheduledevents` lists an event of type Preempt at least 30 s before (source: Virtual Machines,
       "Scheduled Events for Linux VMs"); Azure begins to list events with the first request
gcp    `instance/preempted` changes from FALSE to TRUE up to 30 s before (source: Compute Engine,
       "Spot VMs", "Preemption process")
=====  ==============================================================================================

The agent passes the notice to the node, which reports the sandbox as not ready. kubelet then stops the
containers, each with its own grace period and preStop hook, and creates the pod anew. When `LAST_SECONDS` are
left, or half of the remaining time if that is less, the agent stops the containers that still run.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes_common.concurrency import settled, sleep, start
from infranetes_common.errors import InfranetesError, InvalidArgument, NotFound
from infranetes_common.wire import cri
from vmserver.containers.interface import IContainerProvider
from vmserver.identity.metadata import AWS, AZURE, GCP, MetadataService

POLL_SECONDS = 5.0
GCP_SECONDS = 30.0
_AZURE_PATH = "scheduledevents?api-version=2020-07-01"
_MAX_EVENTS_BYTES = 64 * 1024
LAST_SECONDS = 30.0
SPARE_SECONDS = 5.0  # between the containers' SIGKILL and the machine's end
_MAX_BYTES = 4096
_MAX_WORD = 32

_log = Logger()


@attrs.frozen
class Interruption:
    """The machine's end, as the cloud announces it."""

    at: float  # seconds since 1970 UTC
    reason: str  # in words, for people to read


FindNotice = Callable[[], Awaitable[Interruption | None]]
"""Ask the cloud for a notice; None: there is none. :raise InfranetesError: it can't be asked now."""


class Interruptions:
    """Polls for the notice until it arrives.

    :param tell: called once, with the notice. :param provider: returns the containers' provider.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        find: FindNotice,
        tell: Callable[[Interruption], None],
        provider: Callable[[], IContainerProvider],
    ) -> None:
        self._reactor = reactor
        self._find = find
        self._tell = tell
        self._provider = provider
        self._looking: Deferred[None] | None = None

    def begin(self) -> None:
        """Start polling. Idempotent."""
        if self._looking is None:
            self._looking = start(self._look())
            self._looking.addErrback(_log_unless_cancelled)

    def stop(self) -> None:
        """Stop polling, without stopping containers. Idempotent."""
        if self._looking is not None:
            self._looking.cancel()

    async def _look(self) -> None:
        while (notice := await self._found()) is None:
            await sleep(self._reactor, POLL_SECONDS)
        _log.warn("this VM will be reclaimed: {reason}", reason=notice.reason)
        self._tell(notice)
        left = max(notice.at - self._reactor.seconds(), 0.0)
        last = min(LAST_SECONDS, left / 2)
        await sleep(self._reactor, left - last)
        await self._stop_all(max(int(last - SPARE_SECONDS), 0))

    async def _found(self) -> Interruption | None:
        try:
            return await self._find()
        except InfranetesError as error:
            _log.debug("it is not known now whether this VM will be reclaimed: {error}", error=error)
            return None

    async def _stop_all(self, grace: int) -> None:
        """Stop the containers that still run. :param grace: seconds before they are killed."""
        provider = self._provider()
        running = [one for one in await provider.containers() if one.state == cri.CONTAINER_RUNNING]
        if running:
            _log.warn("{number} containers still run, and are stopped", number=len(running))
        await settled(provider.stop_container(one.id, grace) for one in running)


def _log_unless_cancelled(failure: Failure) -> None:
    if not failure.check(CancelledError):
        _log.failure("watching for the notice that this VM will be reclaimed failed", failure)


def find_by(source: str, service: MetadataService, clock: IReactorTime) -> FindNotice | None:
    """Return the check for a cloud's notice, by the name in `metadata.SOURCES`; None if it sends none."""

    async def aws() -> Interruption | None:
        try:
            return read_aws(await service.read_aws("meta-data/spot/instance-action", _MAX_BYTES))
        except NotFound:
            return None

    async def azure() -> Interruption | None:
        return read_azure(await service.read_azure(_AZURE_PATH, _MAX_EVENTS_BYTES), clock.seconds())

    async def gcp() -> Interruption | None:
        return read_gcp(await service.read_gcp("preempted", _MAX_BYTES), clock.seconds())

    return {AWS: aws, AZURE: azure, GCP: gcp}.get(source)


def read_aws(document: bytes) -> Interruption:
    """Parse EC2's `spot/instance-action`. :raise InvalidArgument: it is not such a document."""
    try:
        found = json.loads(document)
        action, time = found["action"], found["time"]
        at = datetime.fromisoformat(time)
    except (ValueError, TypeError, KeyError):
        raise InvalidArgument(f"EC2's notice can't be read: {document[:200]!r}") from None
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return Interruption(
        at.timestamp(), f"EC2 interrupts the spot instance at {time[:_MAX_WORD]} ({str(action)[:_MAX_WORD]})"
    )


def read_azure(document: bytes, now: float) -> Interruption | None:
    """Parse Azure's `scheduledevents`; None if no eviction is due. :param now: seconds since 1970 UTC.

    :raise InvalidArgument: it is not such a document."""
    try:
        events = json.loads(document)["Events"]
        times = [str(each.get("NotBefore") or "") for each in events if each["EventType"] == "Preempt"]
        # Once an event has begun, Azure no longer gives its time.
        ends = [parsedate_to_datetime(time).timestamp() if time else now for time in times]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise InvalidArgument(f"Azure's events can't be read: {document[:200]!r}") from None
    if not ends:
        return None
    at = min(ends)
    when = datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
    return Interruption(at, f"Azure evicts the spot VM at {when}")


def read_gcp(document: bytes, now: float) -> Interruption | None:
    """Parse Compute Engine's `instance/preempted`; None unless TRUE. :param now: seconds since 1970 UTC."""
    if document.strip() != b"TRUE":
        return None
    return Interruption(now + GCP_SECONDS, f"Compute Engine preempts the spot VM within {GCP_SECONDS:.0f} s")
