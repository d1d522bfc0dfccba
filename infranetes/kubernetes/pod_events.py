# SPDX-License-Identifier: Apache-2.0
"""Reporting to Kubernetes what happens to pods without kubelet's knowledge: by an event and a pod condition.

======================================  ====================  =========================================
what happens                            event                 condition `infranetes.io/Interrupted`
======================================  ====================  =========================================
the cloud will take the pod's VM away   `Interrupted`         True, with the reason
the pod has another VM                                        False
a guest does not ask for its address    `NoAddress`
======================================  ====================  =========================================

If the API server can't be reached a report is tried again for a while, then dropped: nothing depends on it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from urllib.parse import quote

from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.kubernetes.requests import Refused, Requests
from infranetes_common.concurrency import backoff, sleep, start
from infranetes_common.errors import InfranetesError
from infranetes_common.wire import cri

INTERRUPTED, NO_ADDRESS = "Interrupted", "NoAddress"
CONDITION = "infranetes.io/Interrupted"
TRY_SECONDS = 300.0
_PAUSES = (1.0, 30.0)  # between two tries: the first, and the longest
_MAX_MESSAGE = 1024  # of an event

_log = Logger()


class PodEvents(Service):
    """Reports on pods to Kubernetes, as long as the service runs.

    :param node: this node's name.
    """

    def __init__(self, clock: IReactorTime, server: Requests, node: str) -> None:
        self._clock = clock
        self._server = server
        self._node = node
        self._telling: set[Deferred[None]] = set()

    def stopService(self) -> None:
        """Cancel all reports."""
        super().stopService()  # type: ignore[no-untyped-call]
        for each in list(self._telling):
            each.cancel()

    def interrupted(self, pod: cri.PodSandboxMetadata, reason: str) -> None:
        """Report that the cloud will take away the VM of a pod's sandbox."""
        at = self._now()
        self._begin(lambda: self._create_event(pod, INTERRUPTED, reason, at), f"an event of pod {_name(pod)}")
        self._begin(lambda: self._set(pod, True, reason, at), f"the condition of pod {_name(pod)}")

    def moved(self, pod: cri.PodSandboxMetadata) -> None:
        """Report that a pod has a new sandbox after its former one was interrupted."""
        at = self._now()
        message = "the pod has another VM"
        self._begin(lambda: self._set(pod, False, message, at), f"the condition of pod {_name(pod)}")

    def unaddressed(self, pod: cri.PodSandboxMetadata, message: str) -> None:
        """Report that the guest of a pod's sandbox does not ask for its address."""
        at = self._now()
        self._begin(lambda: self._create_event(pod, NO_ADDRESS, message, at), f"an event of pod {_name(pod)}")

    def _begin(self, tell: Callable[[], Awaitable[None]], what: str) -> None:
        telling = start(self._tell(tell, what))
        self._telling.add(telling)
        telling.addErrback(_log_unless_cancelled).addBoth(lambda _: self._telling.discard(telling))

    async def _tell(self, tell: Callable[[], Awaitable[None]], what: str) -> None:
        until = self._clock.seconds() + TRY_SECONDS
        for pause in backoff(*_PAUSES):
            try:
                await tell()
                return
            except Refused as error:
                if error.status in (404, 409):  # the pod is gone, or this was reported before
                    return
                trouble: Exception = error
                if error.status in (400, 403, 422):
                    break
            except InfranetesError as error:
                trouble = error
            if self._clock.seconds() + pause > until:
                break
            await sleep(self._clock, pause)
        _log.warn("{what} could not be written: {error}", what=what, error=trouble)

    async def _create_event(self, pod: cri.PodSandboxMetadata, reason: str, message: str, at: str) -> None:
        digest = hashlib.sha256(f"{pod.uid} {pod.attempt} {message}".encode()).hexdigest()[:16]
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{pod.name}.{digest}", "namespace": pod.namespace},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Pod",
                "namespace": pod.namespace,
                "name": pod.name,
                "uid": pod.uid,
            },
            "type": "Warning",
            "reason": reason,
            "message": message[:_MAX_MESSAGE],
            "source": {"component": "infranetes", "host": self._node},
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
        }
        await self._server.create(f"/api/v1/namespaces/{quote(pod.namespace, safe='')}/events", event)

    async def _set(self, pod: cri.PodSandboxMetadata, interrupted: bool, message: str, at: str) -> None:
        condition = {
            "type": CONDITION,
            "status": str(interrupted),
            "reason": INTERRUPTED if interrupted else "Moved",
            "message": message[:_MAX_MESSAGE],
            "lastTransitionTime": at,
        }
        namespace, name = quote(pod.namespace, safe=""), quote(pod.name, safe="")
        # Because of the UID, patching another pod of this name fails as a conflict.
        patch = {"metadata": {"uid": pod.uid}, "status": {"conditions": [condition]}}
        await self._server.merge(f"/api/v1/namespaces/{namespace}/pods/{name}/status", patch)

    def _now(self) -> str:
        return datetime.fromtimestamp(self._clock.seconds(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _name(pod: cri.PodSandboxMetadata) -> str:
    return f"{pod.namespace}/{pod.name}"


def _log_unless_cancelled(failure: Failure) -> None:
    if not failure.check(CancelledError):
        _log.failure("reporting a pod to Kubernetes failed", failure)
