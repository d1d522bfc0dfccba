# SPDX-License-Identifier: Apache-2.0
"""The provider's start, which may take minutes, while the daemon serves."""

from __future__ import annotations

from twisted.application.service import Service
from twisted.internet.defer import Deferred, succeed
from twisted.logger import Logger

from infranetes.daemon.pods_service import PodsService
from infranetes.daemon.service_manager import ServiceManager
from infranetes_common.concurrency import Event, backoff, sleep, start
from infranetes_common.errors import Unavailable

RETRY_SECONDS = (1.0, 60.0)  # after a provider that could not start: the first pause, and the longest

_log = Logger()


class ProviderStart(Service):
    """Starts the provider in the background: its own `startService` waits for nothing.

    A fault that may pass (`Unavailable`) is tried again, any other is final.

    :ivar started: happens when the provider has started, or fails with why it can't.
    """

    def __init__(self, pods: PodsService, manager: ServiceManager) -> None:
        self._pods = pods
        self._node = pods.node
        self._manager = manager
        self._starting: Deferred[None] = succeed(None)
        self.started: Event[None] = Event()

    def startService(self) -> None:
        Service.startService(self)
        self._starting = start(self._start())
        self._starting.addCallbacks(self.started.succeed, lambda failure: self.started.fail(failure.value))

    def stopService(self) -> None:
        Service.stopService(self)
        self._starting.cancel()

    async def _start(self) -> None:
        pauses = backoff(*RETRY_SECONDS)
        provider = self._node.provider
        while True:
            try:
                if subnet := self._pods.pod_cidr:
                    await provider.configure_network(subnet)
                await provider.start(self._progress)
                break
            except Unavailable as error:
                pause = next(pauses)
                self._node.trouble = str(error)
                _log.warn(
                    "provider {provider} can't start yet: {error}; tried again in {delay:.0f} s",
                    provider=provider.name,
                    error=error,
                    delay=pause,
                )
                # Nobody knows how long it takes: the service manager shall not wait for it.
                self._manager.ready(f"waiting for provider {provider.name}: {error}")
            await sleep(self._node.clock, pause)
        self._pods.provider_started()
        self._manager.ready("serving")

    def _progress(self, words: str) -> None:
        self._node.trouble = words
        _log.info("provider {provider}: {words}", provider=self._node.provider.name, words=words)
        self._manager.progress(words)
