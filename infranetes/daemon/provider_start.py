# SPDX-License-Identifier: Apache-2.0
"""The providers' starts, which may take minutes, while the daemon serves."""

from __future__ import annotations

from functools import partial

from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes.daemon.pods_service import PodsService
from infranetes.daemon.service_manager import ServiceManager
from infranetes.pods.node.node_providers import NodeProvider, Providers
from infranetes.providers.interface import Awaited
from infranetes_common.concurrency import Event, Flight, backoff, deferred, settled, sleep, start, within
from infranetes_common.errors import Unavailable
from infranetes_common.redaction import redacted

AWAITED_SECONDS = 2.0  # between two looks at what is under way
UNDO_SECONDS = 10.0  # for a start that is cancelled
RETRY_SECONDS = (1.0, 60.0)  # the first and the longest pause before another try to start a provider

_log = Logger()


class ProviderStart(Service):
    """Starts the providers in the background, side by side: its own `startService` waits for none.

    After a fault that may pass (`Unavailable`, `Awaited`) the start is tried again; any other is final. It
    affects that provider's pods alone, as long as another provider may start.

    :param delegate: whether other pods are served by a delegate: then the daemon is ready at once, and no
        provider has to start.
    :ivar started: happens when the first provider has started, or fails with why none ever will.
    """

    def __init__(
        self,
        clock: IReactorTime,
        providers: Providers,
        pods: PodsService,
        manager: ServiceManager,
        delegate: bool = False,
    ) -> None:
        self._clock = clock
        self._providers = providers
        self._delegate = delegate
        self._pods = pods
        self._manager = manager
        self._starting: list[Deferred[None]] = []
        self._failed: list[NodeProvider] = []
        self.started: Event[None] = Event()

    def startService(self) -> None:
        Service.startService(self)
        if self._delegate:
            self._manager.ready(self._status())
        for node_provider in list(self._providers):
            starting = start(self._start(node_provider))
            starting.addErrback(partial(self._ended, node_provider))
            self._starting.append(starting)

    @deferred
    async def stopService(self) -> None:
        """Cancel the starts, and wait until what they had begun, such as half of a template, is undone."""
        Service.stopService(self)
        flights = [Flight(starting) for starting in self._starting]
        for flight in flights:
            flight.cancel()
        clock = self._clock
        await settled(within(clock, UNDO_SECONDS, flight.join(), "its end") for flight in flights)

    async def _start(self, node_provider: NodeProvider) -> None:
        pauses = backoff(*RETRY_SECONDS)
        provider = node_provider.provider
        while True:
            try:
                if (subnet := self._pods.pod_cidr) and node_provider.gets_subnet:
                    await provider.configure_network(subnet)
                await provider.start(partial(self._progress, node_provider))
                break
            except Awaited as error:
                pause = AWAITED_SECONDS
                if node_provider.trouble != redacted(str(error)):
                    self._wait(node_provider, error, "")
            except Unavailable as error:
                pause = next(pauses)
                self._wait(node_provider, error, f"; tried again in {pause:.0f} s")
            await sleep(self._clock, pause)
        self._pods.provider_started(node_provider)
        self._manager.ready(self._status())
        self.started.succeed(None)

    def _wait(self, node_provider: NodeProvider, error: Unavailable, when: str) -> None:
        """Report what a provider still needs before it can start."""
        node_provider.trouble = redacted(str(error))
        _log.warn(
            "provider {provider} can't start yet: {error}{when}",
            provider=node_provider.provider.name,
            error=error,
            when=when,
        )
        # No one knows how long this takes, so the service manager must not wait for it.
        self._manager.ready(self._status())

    def _ended(self, node_provider: NodeProvider, failure: Failure) -> None:
        """Record that one provider will not start."""
        assert isinstance(failure.value, Exception)
        self._failed.append(node_provider)
        stopped = failure.check(CancelledError) is not None
        if len(self._failed) == len(self._providers.by_name) and (stopped or not self._delegate):
            self.started.fail(failure.value)
        if stopped:
            return
        node_provider.trouble = (
            f"it can't start: {redacted(str(failure.value))}; restart the daemon once that is fixed"
        )
        if len(self._providers.by_name) > 1 or self._delegate:
            _log.error(
                "provider {provider} can't start: {error}", provider=node_provider.name, error=failure.value
            )
            if self._delegate or not self._providers.trouble:
                self._manager.ready(self._status())

    def _progress(self, node_provider: NodeProvider, words: str) -> None:
        node_provider.trouble = words
        _log.info("provider {provider}: {words}", provider=node_provider.name, words=words)
        if self.started.happened or self._delegate:
            self._manager.ready(self._status())
        else:
            self._manager.progress(words)

    def _status(self) -> str:
        """Return the daemon's status for people."""
        lacking = [node_provider for node_provider in self._providers if node_provider.trouble]
        words = "; ".join(
            f"provider {node_provider.name}: {node_provider.trouble}" for node_provider in lacking
        )
        if len(lacking) == len(self._providers.by_name) and not self._delegate:
            return f"waiting for {words}"
        return f"serving; {words}" if lacking else "serving"
