# SPDX-License-Identifier: Apache-2.0
"""What simulated clouds of calls with JSON have in common: two HTTP servers, and the agents in their VMs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Generic, TypeVar

from twisted.internet.interfaces import IDelayedCall

from tests.support.clouds import agent_processes
from tests.support.clouds.faults import NORMAL, Faults
from tests.support.clouds.http_sites import Answer, Answering, ClosableSite
from tests.support.clouds.vm_image_instances import VMImageInstances

V = TypeVar("V")

QUICK = {
    "retry_first": 0.02,
    "retry_most": 0.2,
    "retry_seconds": 5.0,
    "call_seconds": 20.0,
    "calls_per_second": 200.0,
    "poll_seconds": 0.1,
    "watch_seconds": 0.3,
    "settle_seconds": 1.0,
    "destroy_seconds": 20.0,
}
"""The part of a provider's configuration that makes tests short."""


class SimulatedCloud(Generic[V]):
    """One test's cloud. `V` is what it knows of a VM.

    :ivar faults: what goes wrong. :ivar behaviour: of VMs that are launched from now on.
    :ivar malformed: faults of requests and answers by the cloud's own description of its API.
    :ivar requests: all requests, each with its `Action`. :ivar urls: their URLs. :ivar bodies: of launches.
    :ivar vm_images: its images of VM-image pods.
    :param api_type: the Content-Type of the API's answers. :param metadata_type: of the metadata server's.
    """

    def __init__(self, reactor: Any, directory: Path, api_type: str, metadata_type: str) -> None:
        self._reactor = reactor
        self._directory = directory
        self._agent_processes = agent_processes.shared()
        self._vms: dict[str, V] = {}  # by what names them to `_agent_processes`
        self._tokens: set[str] = set()
        self._stale: dict[str, Any] = {}  # the last answers, by their requests
        self._timers: list[IDelayedCall] = []
        self.faults = Faults()
        self.behaviour = NORMAL
        self.vm_images = VMImageInstances(reactor, self._switched_off)
        self.malformed: list[str] = []
        self.requests: list[dict[str, str]] = []
        self.bodies: list[dict[str, Any]] = []
        self.urls: list[bytes] = []
        self._sites = [
            ClosableSite(Answering(self._answer, api_type)),
            ClosableSite(Answering(self._metadata, metadata_type)),
        ]

    def _listen(self, tls: Any = None) -> None:
        """Start both servers. :param tls: options of the API's certificate; None: it has none."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._imds = self._reactor.listenTCP(0, self._sites[1], interface="0.0.0.0")
        if tls is None:
            self._port = self._reactor.listenTCP(0, self._sites[0], interface="127.0.0.1")
        else:
            self._port = self._reactor.listenSSL(0, self._sites[0], tls, interface="127.0.0.1")
        self.vm_images.start()
        self.endpoint = f"{'http' if tls is None else 'https'}://127.0.0.1:{self._port.getHost().port}"

    async def stop(self) -> None:
        """Stop everything."""
        for timer in self._timers:
            if timer.active():
                timer.cancel()
        for name in self._vms:
            self._agent_processes.kill(name)
        await self.vm_images.stop()
        await self._imds.stopListening()
        await self._port.stopListening()
        for site in self._sites:
            await site.close_connections()
        shutil.rmtree(self._directory, ignore_errors=True)

    def held(self) -> dict[str, str]:
        """Return descriptions of everything that costs money, with the token that it is tagged with."""
        raise NotImplementedError

    def holdings(self) -> list[str]:
        """Return descriptions of everything that costs money."""
        return list(self.held())

    def revoke_tokens(self) -> None:
        """Refuse all tokens from before."""
        self._tokens.clear()

    async def _answer(self, request: Any) -> Answer:
        """Answer a request to the API."""
        raise NotImplementedError

    async def _metadata(self, request: Any) -> Answer:
        """Answer a VM's request to its metadata server."""
        raise NotImplementedError

    def _switched_off(self, id: str) -> None:
        """Note that a VM has switched itself off."""
        raise NotImplementedError
