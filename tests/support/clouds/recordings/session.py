# SPDX-License-Identifier: Apache-2.0
"""A session of recording: the bill, a life, and its end, whatever happens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import attrs
from twisted.internet.defer import Deferred

from infranetes.identity.authority import Authority
from infranetes.providers import registry
from infranetes.providers.cloud.provider import CloudProvider
from infranetes.providers.interface import ProviderContext
from infranetes_common.concurrency import start, within
from infranetes_common.errors import FailedPrecondition, InfranetesError
from infranetes_common.reactors import IReactor
from tests.support.clouds.recordings.bill import bill
from tests.support.clouds.recordings.life import END_SECONDS, GROWN_BYTES, Life, Notes
from tests.support.clouds.recordings.recording import Recorder, read, unknown_texts
from tests.support.clouds.recordings.wire import AWS, GCP, tapped

T = TypeVar("T")

CLOUDS = (AWS, GCP)
NOTES = "notes.json"
_SHORTEST_SECRET = 6  # characters: shorter ones are in the file by chance


@attrs.frozen
class Request:
    """What is to be recorded.

    :ivar cloud: one of CLOUDS. :ivar table: the provider's. :ivar source: the file that the table is from.
    :ivar directory: for what must outlive this session. :ivar path: that of the recording.
    :ivar seconds: the time after which the life is interrupted. :ivar budget: in the currency of the prices.
    """

    cloud: str
    table: Mapping[str, Any]  # Any: TOML
    source: str
    cluster: str
    directory: Path
    path: Path
    seconds: float
    budget: float


class Session:
    """One session. :param ask: asks for confirmation after the bill. :param say: called with the progress."""

    def __init__(
        self,
        reactor: IReactor,
        request: Request,
        ask: Callable[[str], Deferred[bool]],
        say: Callable[[str], None],
    ) -> None:
        self._reactor = reactor
        self._request = request
        self._ask = ask
        self._say = say
        self._notes = Notes.of(request.directory / NOTES)
        self._interrupted = False
        self._step: Deferred[Any] | None = None  # an interruptible step. Any: its own result

    def interrupt(self) -> None:
        """Make `run` end everything now, and fail. Idempotent."""
        self._interrupted = True
        if self._step is not None:
            self._step.cancel()

    async def run(self) -> None:
        """Record. Afterwards nothing is left in the cloud, unless the error says what is.

        :raise InfranetesError: it failed. :raise CancelledError: it was interrupted."""
        request = self._request
        recorder = Recorder(request.cloud, request.path)
        try:
            with tapped(recorder.hear):
                await self._recorded()
        finally:
            recorder.close()
            self._check(recorder)

    async def _recorded(self) -> None:
        provider = self._provider()
        try:
            await self._stepped(provider.start(self._say))
            life = self._life(provider)
            if self._notes.found:
                self._say(f"an earlier recording was killed: ending what is left of node {self._notes.node}")
                await life.end()
            await self._agreed(provider)
            try:
                await self._stepped(
                    within(self._reactor, self._request.seconds, life.live(), "the recording")
                )
            finally:
                self._say("ending everything")
                await life.end()
                self._say("everything that was made is destroyed")
        finally:
            await provider.stop()

    async def _stepped(self, step: Awaitable[T]) -> T:
        """Return the result of a step that may be interrupted. :raise CancelledError: it was."""
        self._step = start(_awaited(step))
        if self._interrupted:
            self._step.cancel()
        try:
            result: T = await self._step
            return result
        finally:
            self._step = None

    def _provider(self) -> CloudProvider[Any]:
        request = self._request
        state = request.directory / "state"
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        context = ProviderContext(state, state, request.cluster, self._notes.node, source=request.source)
        provider = registry.create(self._reactor, request.cloud, request.table, context)
        assert isinstance(provider, CloudProvider)
        return provider

    def _life(self, provider: CloudProvider[Any]) -> Life:
        authority = Authority(self._request.directory / "state")
        return Life(self._reactor, provider, self._request.cluster, self._notes, authority, self._say)

    async def _agreed(self, provider: CloudProvider[Any]) -> None:
        """Show the bill. :raise FailedPrecondition: it is too high, or the user declined."""
        seconds = self._request.seconds + END_SECONDS
        costs = bill(provider, provider._settings.max_sizes, seconds)
        costs.check(self._request.budget)
        words = costs.words(provider._cloud.location, GROWN_BYTES >> 30)
        if not await self._stepped(self._ask(words)):
            raise FailedPrecondition("nobody has agreed: nothing was made")

    # ---- What was recorded

    def _check(self, recorder: Recorder) -> None:
        """Report the result, after checking that nothing of the configuration is in it."""
        request = self._request
        if not recorder.written:
            request.path.unlink()
            return
        texts = list(unknown_texts(read(request.path)))
        survivors = {name for name, secret in self._secrets() if any(secret in text for text in texts)}
        if survivors:
            request.path.unlink()
            raise InfranetesError(
                f"the recording was removed: it had the values of {', '.join(sorted(survivors))}, "
                "which is a fault of what scrubs it; please report it"
            )
        self._say(f"{request.path} has {recorder.written} calls")
        if recorder.failures:
            self._say(f"some were not recorded: {', '.join(sorted(recorder.failures))}")

    def _secrets(self) -> Iterator[tuple[str, str]]:
        """Yield the values of the configuration, and those made up by this session, with their names."""
        made = {"cluster": self._request.cluster, "node": self._notes.node}
        for name, value in {**self._request.table, **made}.items():
            for each in value if isinstance(value, list | tuple) else (value,):
                if isinstance(each, str) and len(each) >= _SHORTEST_SECRET:
                    yield name, each


async def _awaited(step: Awaitable[T]) -> T:
    return await step
