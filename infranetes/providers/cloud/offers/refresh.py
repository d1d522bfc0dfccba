# SPDX-License-Identifier: Apache-2.0
"""Asking a cloud for its sizes and prices: at the first start, and daily."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Generic

from twisted.internet.defer import Deferred, TimeoutError
from twisted.logger import Logger

from infranetes.providers.cloud.calls.calls import BY_THE_WAY, Calls
from infranetes.providers.cloud.calls.passes import one_pass
from infranetes.providers.cloud.interface import CloudError, D
from infranetes.providers.cloud.offers.book import OfferBook
from infranetes_common.concurrency import run_in_thread, sleep, start
from infranetes_common.errors import InfranetesError, Unavailable
from infranetes_common.reactors import IReactor

FRESH_SECONDS = 24 * 3600.0
AGAIN_SECONDS = 3600.0  # between attempts, after a failure
FIRST_SECONDS = 15.0  # after which the first start asks for neither sizes nor prices again
_LATER_SECONDS = 300.0
_PATIENCE = 10.0  # how long the first start waits for prices

_log = Logger()


class OfferRefresh(Generic[D]):
    """Keeps a book up to date.

    :ivar trouble: why the last request for sizes or prices failed, by `sizes` or `prices`."""

    def __init__(self, reactor: IReactor, book: OfferBook[D], calls: Calls[D], retry_seconds: float) -> None:
        self._reactor = reactor
        self._book = book
        self._calls = calls
        self._first_seconds = min(FIRST_SECONDS, retry_seconds)
        self._stopped = False
        self._warned = False  # whether the log says that something is bundled
        self.trouble: dict[str, str] = {}

    async def begin(self) -> None:
        """Find sizes to choose from: those of the file, or else of the cloud, or else bundled ones.

        :raise Unavailable: there are none; says why."""
        self._tell("the file", await run_in_thread(self._reactor, self._book._thd_load))
        patience = 0.0
        if not self._book.answer.offers_at:
            await self._ask("sizes", self._thd_ask_types, self._first_seconds)
            patience = _PATIENCE
        if self._book.answer.offers_at and not self._book.answer.prices_at:
            await self._ask_for_prices(patience)
        await self._fill_gaps()
        if not self._book.everything:
            why = "; ".join(self.trouble.values())
            raise Unavailable(f"{self._book.source.sources.location}: no sizes are known: {why}")

    async def run(self) -> None:
        """Ask again and again until stopped."""
        while not self._stopped:
            await sleep(self._reactor, self._due())
            with one_pass(self._book.source.sources.location, "asking for sizes"):
                await self.refresh(_LATER_SECONDS)
                await self._fill_gaps()

    def stop(self) -> None:
        """Ask no more."""
        self._stopped = True

    async def refresh(self, seconds: float) -> None:
        """Ask for what is not fresh."""
        now, answer = self._book.now(), self._book.answer
        if not _is_fresh(now, answer.offers_at):
            await self._ask("sizes", self._thd_ask_types, seconds)
        if not _is_fresh(now, answer.prices_at):
            await self._ask("prices", self._thd_ask_prices, seconds)

    async def _ask_for_prices(self, patience: float) -> None:
        """Ask for prices, but wait no longer than `patience`: they are used once they come."""
        asking = start(self._ask("prices", self._thd_ask_prices, self._first_seconds))
        waiting: Deferred[None] = Deferred()
        asking.addBoth(lambda _: None if waiting.called else waiting.callback(None))
        with suppress(TimeoutError):
            await waiting.addTimeout(patience, self._reactor)

    def _due(self) -> float:
        """Seconds until the cloud is to be asked again."""
        answer = self._book.answer
        if self.trouble or not answer.prices_at:
            return AGAIN_SECONDS
        age = self._book.now() - min(answer.offers_at, answer.prices_at)
        return max(FRESH_SECONDS - age, AGAIN_SECONDS / 60)

    async def _fill_gaps(self) -> None:
        """Use the bundled sizes, or their prices, where the cloud has never told its own."""
        answer = self._book.answer
        if answer.offers_at and answer.prices_at:
            return
        bundled = await run_in_thread(self._reactor, self._book.source._thd_bundled, answer.offers)
        self._book.use_bundled(bundled)
        if self._warned:
            return
        self._warned = True
        _log.warn(
            "{cloud}: {what} are those of {bundled}, which age: {why}",
            cloud=self._book.source.sources.location,
            what="prices" if answer.offers_at else "sizes and prices",
            bundled=self._book.source.sources.bundled,
            why="; ".join(self.trouble.values()) or "the cloud has not told them yet",
        )

    def _thd_ask_types(self, driver: D) -> str:
        return self._book._thd_keep(offers=self._book.source._thd_types(driver))

    def _thd_ask_prices(self, driver: D) -> str:
        return self._book._thd_keep(prices=self._book.source._thd_prices(driver, self._book.answer.offers))

    async def _ask(self, what: str, work: Callable[[D], str], seconds: float) -> None:
        try:
            words = await self._calls.call(
                f"ask for {what}", work, seconds=seconds, circuit=BY_THE_WAY + what
            )
        except (CloudError, InfranetesError) as error:
            words = f"{what} can't be asked for: {error}"
        self._tell(what, words)

    def _tell(self, what: str, words: str) -> None:
        """Log a trouble once, until it is over."""
        if words and self.trouble.get(what) != words:
            _log.info("{cloud}: {words}", cloud=self._book.source.sources.location, words=words)
        if words:
            self.trouble[what] = words
        else:
            self.trouble.pop(what, None)


def _is_fresh(now: float, at: float) -> bool:
    return 0 <= now - at < FRESH_SECONDS
