# SPDX-License-Identifier: Apache-2.0
"""The start of the ContainerProvider, which may have to wait for its engine."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from infranetes_common.concurrency import backoff, sleep, start
from infranetes_common.errors import InfranetesError
from vmserver.containers.interface import IContainerProvider

START_SECONDS = 10.0  # until the agent takes an identity although its provider has not started
RETRY_SECONDS = (0.25, 5.0)  # the first pause between two attempts, and the longest

_log = Logger()


class ProviderStart:
    """Starts a provider, and retries in the background if that fails."""

    def __init__(self, reactor: IReactorTime, provider: IContainerProvider) -> None:
        self._reactor = reactor
        self._provider = provider
        self._retrying: Deferred[None] | None = None

    async def start(self) -> None:
        """Return once the provider answers, has failed for the first time, or takes too long."""
        attempt: Deferred[None] = self._provider.start()
        try:
            await attempt.addTimeout(START_SECONDS, self._reactor)
        except Exception as error:
            self._failed(error)
            self._retrying = start(self._retry())
            self._retrying.addErrback(lambda failure: None)

    def cancel(self) -> None:
        """Stop retrying."""
        if self._retrying is not None:
            self._retrying.cancel()

    async def _retry(self) -> None:
        for pause in backoff(*RETRY_SECONDS):
            await sleep(self._reactor, pause)
            try:
                await self._provider.start()
            except InfranetesError as error:
                self._failed(error)
            else:
                _log.info("provider {provider} answers", provider=self._provider.name)
                return

    def _failed(self, error: Exception) -> None:
        words = str(error) or type(error).__name__
        _log.error("provider {provider} does not start: {words}", provider=self._provider.name, words=words)
