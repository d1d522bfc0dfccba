# SPDX-License-Identifier: Apache-2.0
"""The book of sizes and prices: what its file keeps, and what is used when the cloud can't be reached."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from twisted.internet.defer import Deferred
from twisted.logger import LogLevel, capturedLogs, formatEvent
from twisted.trial.unittest import SynchronousTestCase, TestCase

from infranetes.providers.cloud.interface import CloudError, ErrorKind, Offer
from infranetes.providers.cloud.offers import refresh as offer_refresh
from infranetes.providers.cloud.offers.book import MAX_OFFERS, OfferBook, Sources
from infranetes.providers.cloud.offers.refresh import OfferRefresh
from infranetes_common.concurrency import sleep, start
from infranetes_common.errors import Unavailable
from tests.contract.pod_provider_case import reactor

GIB = 1 << 30
SMALL = Offer("a.small", 1000, GIB, zones=("z1",))
LARGE = Offer("a.large", 2000, 2 * GIB, zones=("z1", "z2"), shared_cpus=4)
BUNDLED = (Offer("a.small", 1000, GIB, 0.5), Offer("old.small", 1000, GIB, 0.25))
DAY = 24 * 3600.0


class Source:
    """A cloud's offers. :ivar failing: what it refuses. :ivar asked: the requests."""

    sources = Sources("cloud here", "the cloud", "the list", "the package")

    def __init__(self) -> None:
        self.failing: set[str] = set()
        self.asked: list[str] = []
        self.offers: Sequence[Offer] = (SMALL, LARGE)
        self.bundled: Sequence[Offer] = BUNDLED
        self.prices: Mapping[str, float] = {"a.small": 0.1, "a.large": 0.2}

    def _thd_types(self, driver: str) -> Sequence[Offer]:
        self._ask("types")
        return self.offers

    def _thd_prices(self, driver: str, offers: Sequence[Offer]) -> Mapping[str, float]:
        self._ask("prices")
        return self.prices

    def _thd_bundled(self, offers: Sequence[Offer]) -> Sequence[Offer]:
        self._ask("bundled")
        return self.bundled

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if what in self.failing:
            raise CloudError(ErrorKind.CREDENTIALS, f"no {what} for you")


class Calls:
    """Make calls at once. :ivar silent: the calls that get no answer, and since when."""

    def __init__(self) -> None:
        self.silent: dict[str, Deferred[None]] = {}

    async def call(self, what: str, work: Callable[[str], Any], **options: Any) -> Any:
        if what in self.silent:
            await self.silent[what]
        return work("driver")


class BookCase:
    """A book, and the service that updates it."""

    mktemp: Callable[[], str]

    def setUp(self) -> None:
        self.path = Path(self.mktemp()) / "cloud" / "offers.json"
        self.now = 1e9
        self.source = Source()
        self.open()

    def open(self, own: Mapping[str, float] | None = None) -> None:
        """Become the next daemon."""
        self.book: OfferBook[str] = OfferBook(self.path, self.source, own or {}, lambda: self.now)
        self.calls = Calls()
        calls: Any = self.calls  # stands in for a cloud's
        self.refresh: OfferRefresh[str] = OfferRefresh(reactor, self.book, calls, 1.0)

    def priced(self) -> dict[str, tuple[float | None, str]]:
        """Return the offers' prices, and their sources."""
        return {one.name: (one.price, one.priced_by) for one in self.book.offers}


class FileTests(BookCase, SynchronousTestCase):
    def test_what_was_told_is_there_for_the_next_daemon(self) -> None:
        self.book._thd_keep(offers=[SMALL, LARGE])
        self.now += 5
        self.book._thd_keep(prices={"a.small": 0.1})
        self.assertEqual(self.path.stat().st_mode & 0o777, 0o600)
        self.open()
        self.assertEqual(self.book._thd_load(), "")
        self.assertEqual((self.book.answer.offers_at, self.book.answer.prices_at), (1e9, 1e9 + 5))
        self.assertEqual(
            self.book.offers,
            (attrs.evolve(SMALL, price=0.1, priced_by="the list"), attrs.evolve(LARGE)),
        )

    def test_a_daemon_killed_while_it_writes_leaves_the_old_file(self) -> None:
        self.book._thd_keep(offers=[SMALL])
        before = self.path.read_bytes()

        class Killed(BaseException):
            pass

        def kill(*args: object) -> None:
            raise Killed

        self.patch(Path, "replace", kill)
        self.assertRaises(Killed, self.book._thd_keep, offers=[LARGE])
        self.assertEqual(self.path.read_bytes(), before)
        beside = self.path.with_name(self.path.name + ".new")
        beside.write_text('{"offers": [')  # as a kill during a write would leave it
        self.open()
        self.assertEqual(self.book._thd_load(), "")
        self.assertEqual([one.name for one in self.book.offers], ["a.small"])

    def test_a_file_that_is_cut_off_or_is_none_of_ours_is_not_used(self) -> None:
        self.book._thd_keep(offers=[SMALL], prices={"a.small": 0.1})
        whole = self.path.read_bytes()
        other = json.loads(whole)
        for content in (
            *(whole[:end] for end in range(0, len(whole), 7)),
            b"\xff\xfe",
            b"[1]",
            b"null",
            json.dumps({**other, "offers": [{"name": 1}]}).encode(),
            json.dumps({**other, "offers_at": "today"}).encode(),
            b" " * ((16 << 20) + 1),
        ):
            self.path.write_bytes(content)
            self.open()
            self.assertIn(str(self.path), self.book._thd_load())
            self.assertEqual((self.book.offers, self.book.answer.offers_at), ((), 0.0))

    def test_a_file_of_another_region_or_release_is_not_used(self) -> None:
        self.book._thd_keep(offers=[SMALL])
        for change in ({"location": "cloud elsewhere"}, {"format": 2}):
            self.path.write_text(json.dumps({**json.loads(self.path.read_text()), **change}))
            self.open()
            self.assertEqual((self.book._thd_load(), self.book.offers), ("", ()))

    def test_what_can_not_be_is_not_kept(self) -> None:
        odd = [attrs.evolve(SMALL, name=name) for name in ("", "../up", "a" * 65, "a b", "a\n")] + [
            attrs.evolve(SMALL, cpu_millis=0),
            attrs.evolve(SMALL, memory_bytes=-1),
            attrs.evolve(SMALL, memory_bytes=1 << 60),
            attrs.evolve(SMALL, gpus=-1),
        ]
        self.book._thd_keep(offers=[*odd, LARGE])
        self.assertEqual([one.name for one in self.book.offers], ["a.large"])
        prices = {"a.large": float("nan"), "b": -1.0, "c": float("inf"), "d": 0.0, "e": 1e9, "f": 1.0}
        self.book._thd_keep(prices=prices)
        self.assertEqual(self.book.answer.prices, {"f": 1.0})
        self.assertRaises(CloudError, self.book._thd_keep, offers=odd)
        self.assertRaises(CloudError, self.book._thd_keep, prices={"b": -1.0})
        self.assertEqual([one.name for one in self.book.offers], ["a.large"])
        many = [attrs.evolve(SMALL, name=f"a.{number}") for number in range(MAX_OFFERS + 5)]
        self.book._thd_keep(offers=many)
        self.assertEqual(len(self.book.offers), MAX_OFFERS)

    def test_a_full_disk_is_said_and_what_was_told_is_used(self) -> None:
        self.path.parent.parent.mkdir(parents=True)
        self.path.parent.write_text("in the way")
        self.assertIn("can't be written", self.book._thd_keep(offers=[SMALL]))
        self.assertEqual([one.name for one in self.book.offers], ["a.small"])

    def test_ones_own_prices_win_over_the_clouds_and_these_over_bundled_ones(self) -> None:
        self.open({"a.small": 0.05})
        self.book._thd_keep(offers=[SMALL, LARGE, attrs.evolve(LARGE, name="old.small")])
        self.book._thd_keep(prices={"a.small": 0.1, "a.large": 0.2})
        self.book.use_bundled(BUNDLED)
        self.assertEqual(
            self.priced(),
            {
                "a.small": (0.05, "prices_file"),
                "a.large": (0.2, "the list"),
                "old.small": (0.25, "the package"),
            },
        )
        self.assertEqual(self.book.dollars("a.small"), 0.05)
        self.assertIsNone(self.book.dollars("b.small"))

    def test_only_what_a_zone_in_use_has_is_offered(self) -> None:
        self.book._thd_keep(offers=[SMALL, LARGE, attrs.evolve(SMALL, name="any", zones=())])
        self.book.use_zones(["z2", "z3"])
        self.assertEqual([one.name for one in self.book.offers], ["a.large", "any"])
        self.assertEqual(len(self.book.everything), 3)

    def test_prices_of_other_currencies_are_no_dollars(self) -> None:
        self.source.sources = attrs.evolve(Source.sources, currency="CNY")
        self.book._thd_keep(offers=[SMALL], prices={"a.small": 0.7})
        self.assertEqual(self.priced()["a.small"][0], 0.7)
        self.assertIsNone(self.book.dollars("a.small"))


class RefreshTests(BookCase, TestCase):
    def begin(self) -> Any:
        return start(self.refresh.begin())

    async def test_the_first_start_asks_and_uses_nothing_else(self) -> None:
        await self.begin()
        self.assertEqual(self.source.asked, ["types", "prices"])
        self.assertEqual(self.priced()["a.small"], (0.1, "the list"))

    async def test_a_file_is_used_at_the_start_however_old_it_is(self) -> None:
        await self.begin()
        self.now += 400 * DAY
        self.open()
        self.source.asked.clear()
        await self.begin()
        self.assertEqual((self.source.asked, len(self.book.offers)), ([], 2))

    async def test_no_start_waits_for_prices_for_long_and_the_next_ones_not_at_all(self) -> None:
        for patience in (0.01, 600.0):
            self.patch(offer_refresh, "_PATIENCE", patience)
            self.open()
            told: Deferred[None] = Deferred()
            self.calls.silent["ask for prices"] = told
            await self.begin().addTimeout(30.0, reactor)
            self.assertEqual(self.priced()["a.small"], (0.5, "the package"))
        told.callback(None)
        self.assertEqual(self.priced()["a.small"], (0.1, "the list"))

    async def test_it_is_asked_again_when_a_day_is_over(self) -> None:
        await self.begin()
        self.now += DAY - 1
        await start(self.refresh.refresh(1.0))
        self.assertEqual(self.source.asked, ["types", "prices"])
        self.now += 1
        self.source.prices = {"a.small": 0.3}
        await start(self.refresh.refresh(1.0))
        self.assertEqual(self.source.asked, ["types", "prices"] * 2)
        self.assertEqual(self.priced()["a.small"][0], 0.3)
        self.assertAlmostEqual(self.refresh._due(), DAY)

    async def test_what_is_refused_later_leaves_what_was_told(self) -> None:
        await self.begin()
        self.now += 2 * DAY
        self.source.failing = {"types", "prices"}
        await start(self.refresh.refresh(1.0))
        self.assertEqual(self.priced()["a.small"], (0.1, "the list"))
        self.assertEqual(self.refresh._due(), offer_refresh.AGAIN_SECONDS)
        self.assertEqual(set(self.refresh.trouble), {"sizes", "prices"})
        self.source.failing = set()
        await start(self.refresh.refresh(1.0))
        self.assertEqual((self.refresh.trouble, self.book.answer.offers_at), ({}, self.now))

    async def test_bundled_ones_serve_where_the_cloud_has_never_told(self) -> None:
        self.source.failing = {"types", "prices"}
        with capturedLogs() as logged:
            await self.begin()
            for _ in range(2):
                await start(self.refresh.refresh(1.0))
                await start(self.refresh._fill_gaps())
        said = [formatEvent(event) for event in logged if event["log_level"] is LogLevel.warn]
        self.assertEqual(
            said,
            [
                "cloud here: sizes and prices are those of the package, which age: "
                "sizes can't be asked for: no types for you"
            ],
        )
        self.assertEqual(self.priced(), {"a.small": (0.5, "the package"), "old.small": (0.25, "the package")})
        self.assertFalse(self.path.exists())
        self.source.failing = {"prices"}
        await start(self.refresh.refresh(1.0))
        self.assertEqual(self.priced(), {"a.small": (0.5, "the package"), "a.large": (None, "")})
        self.source.failing = set()
        await start(self.refresh.refresh(1.0))
        self.assertEqual(self.priced()["a.large"], (0.2, "the list"))

    async def test_without_any_sizes_it_does_not_begin(self) -> None:
        self.source.failing = {"types"}
        self.source.bundled = ()
        error = await self.assertFailure(self.begin(), Unavailable)
        self.assertIn("no types for you", str(error))
        self.source.failing = set()
        await self.begin()
        self.assertEqual(len(self.book.offers), 2)

    async def test_it_goes_on_asking_until_it_is_stopped(self) -> None:
        self.patch(offer_refresh, "AGAIN_SECONDS", 0.01)
        self.source.failing = {"types", "prices"}
        await self.begin()
        running = start(self.refresh.run())
        while self.source.asked.count("types") < 4:
            await sleep(reactor, 0.01)
        self.source.failing = set()
        while not self.book.answer.prices_at:
            await sleep(reactor, 0.01)
        self.refresh.stop()
        running.addErrback(lambda _: None).cancel()
        self.assertEqual(len(self.book.offers), 2)
