# SPDX-License-Identifier: Apache-2.0
"""A node's page in a browser: a real daemon with simulated VMs, and Debian's Chromium."""

from __future__ import annotations

import shutil
import tempfile
import time
from typing import Any

from twisted.internet import reactor as the_reactor
from twisted.web.resource import Resource
from twisted.web.server import Site
from twisted.web.static import Data

from infranetes.observer import LaunchStep
from infranetes_common.concurrency import deferred
from infranetes_simulation.provider.settings import BEHAVIOUR_ANNOTATION, FAILS
from tests.harness.needs import Need, Tier, find_program, needs
from tests.infranetes.daemon.metrics import MetricsCase
from tests.support.chromium import Chromium, Page
from txgrpc import GrpcError

reactor: Any = the_reactor

PNG = b"\x89PNG\r\n"
#: The rows of the table below each heading, as the texts of their cells.
TABLES = """Object.fromEntries([...document.querySelectorAll('section')].map(section => [
    section.querySelector('h2').innerText,
    [...section.querySelectorAll('tbody tr')].map(row => [...row.cells].map(cell => cell.innerText))]))"""
#: For each launch: the steps as drawn, with their widths in pixels and their colours.
BARS = """[...document.querySelectorAll('svg')].map(bar => [...bar.querySelectorAll('rect')].map(step => ({
    step: step.getAttribute('class'), width: step.getBoundingClientRect().width,
    colour: getComputedStyle(step).fill})))"""
#: What can't be seen without scrolling sideways: its text and its right edge.
TOO_WIDE = """[...document.querySelectorAll('body *')]
    .map(each => [each.tagName, each.textContent.slice(0, 40), each.getBoundingClientRect().right])
    .filter(([, , right]) => right > window.innerWidth)"""


@needs(Need("Chromium", "make test-page", Tier.NIGHTLY, lambda: find_program("chromium") is not None))
class BrowserCase(MetricsCase):
    """A daemon with metrics, and a browser."""

    timeout = 240

    async def browser_page(self) -> Page:
        profile = tempfile.mkdtemp(prefix="chromium-")
        self.addCleanup(shutil.rmtree, profile, True)
        browser = Chromium.start(reactor, profile)
        self.addCleanup(deferred(browser.end))
        return await browser.page()


class PageTests(BrowserCase):
    """The page of a node with pods, a pool and errors."""

    def written(self) -> str:
        return super().written() + "\n[[pool.sizes]]\ncount = 1\n"

    async def node_page(self) -> Page:
        """Return the page of such a node, not loaded yet."""
        page = await self.browser_page()
        self.config["pool"] = {"parallel": 1, "per_minute": 600}
        await self.start()
        for name in ("web", "database"):
            sandbox = await self.run_pod(name)
        await self.run_container(sandbox, self.box(script="sleep 600"))
        failing = self.pod("bad", annotations={BEHAVIOUR_ANNOTATION: FAILS})
        with self.assertRaises(GrpcError):
            await self.run_pod("bad", failing)
        until = time.monotonic() + 60.0 * self.patience
        while await self.value("pool_vms", handler="", state="idle") < 1:
            self.assertLess(time.monotonic(), until, self.log[-3000:])
            await self.sleep(0.1)
        return page

    async def test_pods_launches_the_pool_and_errors_are_there(self) -> None:
        page = await self.node_page()
        await page.be(1280, 900)
        await page.open(self.url)
        tables = await page.evaluate(TABLES)
        self.assertEqual([row[:2] for row in tables["Providers"]], [["simulated", "ready"]])
        (heading,) = (each for each in tables if each.startswith("Pods and their VMs ("))
        pods = {row[0]: row for row in tables[heading]}
        self.assertLessEqual({"default/web", "default/database"}, pods.keys())
        self.assertEqual(pods["default/web"][1], "ready")
        self.assertEqual(pods["default/database"][3], "1 of 1 run")
        outcomes = {row[1]: row[-1] for row in tables["Launches"]}
        self.assertEqual(outcomes["default/web"].strip(), "ready")
        self.assertIn("request: ", outcomes["default/bad"])
        self.assertEqual([row[1:3] for row in tables["Pool"]], [["1", "1 idle"]])
        warned = [what for _, level, what in tables["Warnings and errors"] if level == "warn"]
        self.assertTrue([each for each in warned if "failed to launch: " in each], warned)
        self.assertTrue((await page.screenshot()).startswith(PNG))

    async def test_launches_are_drawn_to_scale_in_the_steps_colours(self) -> None:
        page = await self.node_page()
        await page.be(1280, 900)
        await page.open(self.url)
        bars = await page.evaluate(BARS)
        steps = [step for bar in bars for step in bar]
        self.assertLessEqual({each["step"] for each in steps}, {each.value for each in LaunchStep})
        longest = max(sum(each["width"] for each in bar) for bar in bars)
        self.assertLess(abs(longest - 500), 2)
        by_step = {each["step"]: each["colour"] for each in steps}
        self.assertGreater(len(by_step), 3)
        self.assertEqual(len(set(by_step.values())), len(by_step), by_step)  # none is just black

    async def test_it_asks_nobody_else_and_the_console_stays_empty(self) -> None:
        page = await self.node_page()
        await page.open(self.url)
        self.assertEqual(sorted(page.requests), [self.url, f"{self.url}style.css"])
        self.assertEqual(page.complaints, [])

    async def test_on_a_phone_all_of_it_is_read_without_scrolling_sideways(self) -> None:
        page = await self.node_page()
        await page.be(360, 800, phone=True)
        await page.open(self.url)
        self.assertEqual(await page.evaluate("window.innerWidth"), 360)
        self.assertEqual(await page.evaluate(TOO_WIDE), [])
        text = await page.evaluate("document.body.innerText")
        for words in ("default/web", "default/database", "1 of 1 run", "failed to launch: "):
            self.assertIn(words, text)
        heads = "[...document.querySelectorAll('td')].map(each => getComputedStyle(each, '::before').content)"
        self.assertLessEqual({'"Address: "', '"Seconds: "', '"Wanted: "'}, {*await page.evaluate(heads)})
        self.assertTrue((await page.screenshot()).startswith(PNG))


class OtherPageTests(BrowserCase):
    """The functions that look for faults of a page do find them."""

    async def test_requests_and_complaints_are_seen(self) -> None:
        root = Resource()
        other = b"<img src='http://other.invalid/x.png'><script>nonsense()</script>"
        wide = b"<p style='width: 3000px'>wide"
        root.putChild(b"", Data(other + wide, "text/html"))
        port = reactor.listenTCP(0, Site(root), interface="127.0.0.1")
        self.addCleanup(port.stopListening)
        page = await self.browser_page()
        await page.be(360, 800)
        await page.open(f"http://127.0.0.1:{port.getHost().port}/")
        self.assertIn("http://other.invalid/x.png", page.requests)
        self.assertIn("nonsense is not defined", str(page.complaints))
        self.assertEqual([tag for tag, *_ in await page.evaluate(TOO_WIDE)], ["P"])
