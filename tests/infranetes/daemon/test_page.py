# SPDX-License-Identifier: Apache-2.0
"""A node's page in a browser: a real daemon with simulated VMs, and Debian's Chromium."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from twisted.internet import reactor as the_reactor
from twisted.web.resource import Resource
from twisted.web.server import Site
from twisted.web.static import Data

from infranetes.observer import LaunchStep
from infranetes_common.concurrency import deferred
from infranetes_common.wire import cri
from infranetes_simulation.provider.settings import BEHAVIOUR_ANNOTATION, FAILS
from tests.harness.durations import slow
from tests.harness.needs import Need, Tier, find_program, needs
from tests.infranetes.daemon.metrics import MetricsCase
from tests.support import axe
from tests.support.chromium import Chromium, Page
from txgrpc import GrpcError

reactor: Any = the_reactor

MODES, WIDTHS = ("light", "dark"), (390, 820, 1440)
EVIL = "<img src=x onerror=document.title='hacked'><script>document.title='hacked'</script>"
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


@slow(60, "a browser starts for each test, and looks at a page in several ways")
@needs(Need("Chromium", "make test-page", Tier.NIGHTLY, lambda: find_program("chromium") is not None))
class BrowserCase(MetricsCase):
    """A daemon with metrics, and a browser."""

    timeout = 240
    maxDiff = None

    async def browser_page(self) -> Page:
        profile = tempfile.mkdtemp(prefix="chromium-")
        self.addCleanup(shutil.rmtree, profile, True)
        browser = Chromium.start(reactor, profile)
        self.addCleanup(deferred(browser.end))
        return await browser.page()

    async def until_live(self, page: Page) -> None:
        """Wait until the page says that it shows what is."""
        await self.until_true(page, "document.getElementById('live')?.textContent === 'live'")

    async def until_true(self, page: Page, expression: str) -> None:
        """Wait until an expression holds in the page, which may be loading another one."""
        until = time.monotonic() + 30.0 * self.patience
        while not await page.evaluate(f"Boolean({expression})"):
            self.assertLess(time.monotonic(), until, expression)
            await self.sleep(0.05)

    async def keep(self, page: Page, name: str) -> None:
        """Write what a page looks like into the directory that $PICTURES names, for people to look at."""
        picture = await page.screenshot()
        self.assertTrue(picture.startswith(PNG))
        if directory := os.environ.get("PICTURES"):
            Path(directory, f"{name}.png").write_bytes(picture)


@needs(axe.NEED)
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

    async def test_every_eye_and_hand_can_use_it_and_the_page_of_a_pod(self) -> None:
        page = await self.node_page()
        faults = {}
        for name, path in (("node", ""), ("pod", "pods/default/database"), ("failed", "pods/default/bad")):
            for mode in MODES:
                await page.call(
                    "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": mode}]
                )
                for width in WIDTHS:
                    await page.be(width, 900)
                    await page.open(self.url + path)
                    await self.until_live(page)
                    faults[name, mode, width] = await axe.faults(reactor, page)
                    wide = await page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
                    self.assertLessEqual(wide, 0, f"at {width}, page {name} itself scrolls sideways")
                    await self.keep(page, f"{name}-{mode}-{width}")
        self.assertEqual({where: each for where, each in faults.items() if each}, {})

    async def test_the_page_of_a_pod_follows_what_happens_to_it(self) -> None:
        page = await self.node_page()
        await page.open(self.url + "?search=database")
        await page.evaluate("document.querySelector('#pods tr:not([hidden]) a').click()")
        await self.until_true(page, "document.querySelector('h1')?.innerText.startsWith('default/database')")
        await self.until_live(page)
        await page.evaluate("window.same = true")
        (pod,) = [each for each in await self.sandboxes() if each.metadata.name == "database"]
        await self.run_container(pod.id, self.box("second", "exit 7"))
        await self.until_true(page, "document.getElementById('containers').innerText.includes('second')")
        await self.until_true(
            page, "/second.*exited.*7/s.test(document.getElementById('containers').innerText)"
        )
        for part in ("timeline", "events"):
            text = await page.evaluate(f"document.getElementById('{part}').innerText")
            self.assertIn("second", text)
        self.assertIn(
            "metrics.token_file", await page.evaluate("document.getElementById('console').innerText")
        )
        self.assertIs(await page.evaluate("window.same"), True)
        await self.stop_pod(pod.id)
        await self.remove_pod(pod.id)
        await self.until_true(page, "document.querySelector('h1').innerText.includes('removed')")
        await page.call("Input.dispatchKeyEvent", type="keyDown", key="Escape")
        await self.until_true(page, "document.querySelector('#search')?.value === 'database'")
        self.assertEqual(page.complaints, [])

    async def test_the_page_of_no_pod(self) -> None:
        page = await self.node_page()
        await page.open(self.url + "pods/nonsense")
        self.assertIn("nothing is known of a pod 'nonsense'", await page.evaluate("document.body.innerText"))

    async def test_what_a_pod_says_of_itself_is_shown_and_not_executed(self) -> None:
        page = await self.node_page()
        config = self.pod("hostile", labels={"label": EVIL}, annotations={"note": EVIL})
        config.metadata.namespace = EVIL
        config.metadata.uid = EVIL
        sandbox = await self.run_pod("hostile", config)
        box = self.box("main", "sleep 600", envs=[cri.KeyValue(key="PASSWORD", value=b"hunter2")])
        box.metadata.name = EVIL
        await self.run_container(sandbox, box)
        for path in ("", f"pods/{sandbox}"):
            await page.open(self.url + path)
            await self.until_live(page)
            text = await page.evaluate("document.body.innerText")
            self.assertIn(EVIL, text)
            self.assertNotIn("hunter2", text)
            self.assertNotEqual(await page.evaluate("document.title"), "hacked")
            self.assertEqual(await page.evaluate("document.querySelectorAll('img, main script').length"), 0)
        self.assertEqual(page.complaints, [])

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
        await self.until_live(page)
        own = [self.url, *(f"{self.url}{name}" for name in ("live", "page.js", "style.css"))]
        self.assertEqual(sorted(each for each in page.requests if each != "data:,"), own)
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


class PicturesTests(BrowserCase):
    """The pictures in docs/, of a node whose name says that its VMs are simulated: `make pictures`."""

    def written(self) -> str:
        return super().written() + "\n[[pool.sizes]]\ncount = 2\n"

    async def test_of_a_node_and_of_a_pod(self) -> None:
        page = await self.browser_page()
        self.config["node"] = "node-with-simulated-vms"
        self.config["pool"] = {"parallel": 1, "per_minute": 600}
        self.config["providers"]["simulated"].update(boot_seconds=0.4, jitter_seconds=0.8)
        await self.start()
        for number in range(3):
            for namespace, name in (("shop", "web"), ("shop", "worker"), ("build", "job")):
                config = self.pod(f"{name}-{number}")
                config.metadata.namespace = namespace
                sandbox = await self.run_pod(config.metadata.name, config)
        await self.run_container(sandbox, self.box(script="sleep 600"))
        with self.assertRaises(GrpcError):
            await self.run_pod("bad", self.pod("bad", annotations={BEHAVIOUR_ANNOTATION: FAILS}))
        await page.be(1280, 1000)
        for name, path in (("metrics-page", ""), ("metrics-pod", "pods/build/job-2")):
            await page.open(self.url + path)
            await self.until_live(page)
            text = await page.evaluate("document.body.innerText")
            self.assertIn("node-with-simulated-vms", text)
            await self.keep(page, name)


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
