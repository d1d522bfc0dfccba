# SPDX-License-Identifier: Apache-2.0
"""The node's page in a browser, live: Debian's Chromium, and a node made of fakes."""

from __future__ import annotations

import shutil
import tempfile
from functools import partial
from typing import Any

import attrs

from infranetes.monitoring.live import streams
from infranetes.pods.node.inventory import Sandbox
from infranetes.pods.store.records import SandboxRecord
from infranetes.pods.store.states import SandboxState
from infranetes.pods.vm.sandbox_vm import machine_for
from infranetes_common.concurrency import deferred, sleep
from infranetes_common.reactors import installed
from tests.harness.durations import slow
from tests.harness.needs import Need, Tier, find_program, needs
from tests.infranetes.monitoring.test_service import SECRET, MonitoringCase, _Pods
from tests.infranetes.pods.fakes import pod
from tests.support.chromium import Chromium, Page

reactor = installed()

EVIL = "<img src=x onerror=document.title='hacked'><script>document.title='hacked'</script>"
NAMES = "[...document.querySelectorAll('#pods tr:not([hidden]) td:first-child')].map(each => each.innerText)"
FOCUSED = "document.activeElement.innerText"
LIVE = "document.getElementById('live')?.textContent"


@slow(60, "a browser starts for each test, and waits for what the page does")
@needs(Need("Chromium", "make test-page", Tier.NIGHTLY, lambda: find_program("chromium") is not None))
class LivePageCase(MonitoringCase):
    timeout = 240

    async def open(self, url: str = "", *, live: bool = True) -> Page:
        profile = tempfile.mkdtemp(prefix="chromium-")
        self.addCleanup(shutil.rmtree, profile, True)
        browser = Chromium.start(reactor, profile)
        self.addCleanup(deferred(browser.end))
        page = await browser.page()
        await page.be(1440, 900)
        await page.open(url or await self.serve(page=True))
        if live:
            await self.until(page, LIVE, "live")
        return page

    async def until(self, page: Page, expression: str, value: Any) -> None:
        """Wait until an expression has this value in the page. Any: JSON."""
        for _ in range(600):
            if (last := await page.evaluate(expression)) == value:
                return
            await sleep(reactor, 0.05)
        self.fail(f"{expression} is {last!r}, not {value!r}")

    async def press(self, page: Page, key: str, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            await page.call(
                "Input.dispatchKeyEvent", type=kind, key=key, text=text if kind == "keyDown" else ""
            )

    async def type(self, page: Page, text: str) -> None:
        for each in text:
            await self.press(page, each, each)

    def add(self, name: str, number: int, namespace: str = "default", message: str = "") -> Sandbox:
        """Add a ready pod without a VM."""
        node = self.world.node
        config = pod(name)
        config.metadata.namespace = namespace
        record = SandboxRecord(
            f"{number:032x}", name, SandboxState.READY, f"{namespace}/{name}",
            config.SerializeToString(), "", (1_700_000_000 + number) * 10**9, "fake", "docker",
            message=message,
        )  # fmt: skip
        sandbox = Sandbox(record, partial(machine_for, node.providers, node.inventory))
        node.inventory.add(sandbox)
        return sandbox


class LiveTests(LivePageCase):
    """What the page does by itself."""

    async def test_pods_come_change_and_go_without_a_reload(self) -> None:
        self.world.provider_ready()
        page = await self.open()
        await page.evaluate("window.same = true")
        front = await self.world.sandboxes.run(pod("front"), "")
        await self.until(page, NAMES, ["default/front"])
        await self.world.sandboxes.run(pod("back"), "")
        await self.until(page, f"{NAMES}.sort()", ["default/back", "default/front"])
        self.assertIn("Pods and their VMs (2)", await page.evaluate("document.body.innerText"))
        await self.world.sandboxes.stop(front)
        await self.until(page, f"document.getElementById('pod-{front}').dataset.state", "stopped")
        await self.world.sandboxes.remove(front)
        await self.until(page, NAMES, ["default/back"])
        self.assertIs(await page.evaluate("window.same"), True)
        self.assertEqual(page.complaints, [])

    async def test_ages_grow(self) -> None:
        front = self.add("front", 1)
        front.record = attrs.evolve(front.record, created_at=int(reactor.seconds() * 1e9))
        page = await self.open()
        age = "document.querySelector('time.age').textContent"
        first = await page.evaluate(age)
        for _ in range(100):
            if await page.evaluate(age) != first:
                return
            await sleep(reactor, 0.1)
        self.fail(f"it stays {first}")

    async def test_what_a_pod_wrote_is_shown_and_not_executed(self) -> None:
        self.add(EVIL, 1, EVIL, EVIL)
        page = await self.open()
        self.add(EVIL, 2, "other", EVIL)
        await self.until(page, "document.querySelectorAll('#pods tr').length", 2)
        self.assertNotIn("hacked", await page.evaluate("document.title"))
        self.assertEqual(await page.evaluate("document.querySelectorAll('img, #pods script').length"), 0)
        self.assertIn(EVIL, await page.evaluate("document.getElementById('pods').innerText"))
        self.assertEqual(page.complaints, [])

    async def test_even_html_that_got_through_would_not_be_executed(self) -> None:
        """The Content-Security-Policy is a second wall."""
        page = await self.open()
        await page.evaluate(f"document.querySelector('main').innerHTML = {EVIL!r}; 0")
        await sleep(reactor, 0.5)
        self.assertNotIn("hacked", await page.evaluate("document.title"))
        self.assertIn("Content Security Policy", str(page.complaints))

    async def test_with_the_token_in_the_url_too(self) -> None:
        url = await self.serve(page=True, token_file=self.file(SECRET))
        page = await self.open(url.replace("://", f"://me:{SECRET}@"))
        self.add("front", 1)
        await self.until(page, NAMES, ["default/front"])

    async def test_a_page_that_is_no_longer_live_says_so_and_becomes_so_again(self) -> None:
        self.add("front", 1)
        back = self.add("back", 2)
        page = await self.open()
        await self.serving._streams.stop()
        self.world.node.inventory.discard(back)  # nobody is told of that
        await self.until(page, f"{LIVE}?.startsWith('not live')", True)
        await self.until(page, LIVE, "live")
        await self.until(page, NAMES, ["default/front"])

    async def test_where_too_many_follow_it_is_loaded_again_until_there_is_room(self) -> None:
        self.patch(streams, "MAX_READERS", 0)
        page = await self.open(await self.serve(page=True), live=False)
        await self.until(page, f"{LIVE}?.includes('refuses more readers')", True)
        self.patch(streams, "MAX_READERS", 16)
        await self.until(page, LIVE, "live")

    async def test_a_window_that_nobody_sees_leaves_its_connection_to_others(self) -> None:
        self.add("front", 1)
        page = await self.open()
        hide = "Object.defineProperty(document, 'hidden', { value: %s, configurable: true }); "
        tell = "document.dispatchEvent(new Event('visibilitychange'))"
        await page.evaluate(hide % "true" + tell)
        while self.serving._streams.readers:
            await sleep(reactor, 0.05)
        self.world.node.inventory.discard(self.world.node.inventory.sandbox(f"{1:032x}"))
        self.add("back", 2)
        await page.evaluate(hide % "false" + tell)
        await self.until(page, NAMES, ["default/back"])

    async def test_without_scripts_it_shows_the_same_and_loads_itself_again(self) -> None:
        self.add("front", 1)
        page = await self.open()
        await page.call("Emulation.setScriptExecutionDisabled", value=True)
        await page.open(await page.evaluate("location.href"))
        self.assertEqual(await page.evaluate(NAMES), ["default/front"])
        hidden = "['filter', 'keys', 'mode'].map(id => getComputedStyle(document.getElementById(id)).display)"
        self.assertEqual(await page.evaluate(hidden), ["none"] * 3)
        self.add("back", 2)
        await self.until(page, NAMES, ["default/back", "default/front"])  # after 10 s


class PodPageTests(LivePageCase):
    """The page of a pod that goes and comes back, as one does whose name stays."""

    async def test_a_pod_that_comes_back_is_shown_whole_again(self) -> None:
        pods = _Pods()
        url = await self.serve(page=True)
        self.serving.show_pods(pods)
        page = await self.open(url + "pods/default/web")
        pods.names.clear()
        await self.until(page, "document.querySelector('h1').innerText.trim()", "gone")
        self.assertEqual(await page.evaluate("document.getElementById('facts').innerText"), "")
        pods.names.add("default/web")
        await self.until(page, "document.getElementById('facts').innerText.includes('abc')", True)
        self.assertIn("default/web", await page.evaluate("document.querySelector('h1').innerText"))
        self.assertEqual(page.complaints, [])


class ChoiceTests(LivePageCase):
    """Searching, choosing, keys and modes."""

    async def setUp(self) -> None:
        super().setUp()
        for number, name in enumerate(("web-1", "web-2", "database", "queue")):
            self.add(name, number, "shop" if name == "queue" else "default")
        self.add("ill", 9, "shop", "no answer for 3 minutes")

    async def test_a_search_finds_words_of_all_columns(self) -> None:
        page = await self.open()
        await self.press(page, "/", "/")
        await self.type(page, "shop ANSWER")
        self.assertEqual(await page.evaluate(NAMES), ["shop/ill"])
        self.assertEqual(await page.evaluate("document.getElementById('chosen').value"), "1 of 5")
        self.add("shop-answers", 10)
        await self.until(page, NAMES, ["default/shop-answers", "shop/ill"])
        await self.press(page, "Escape")
        self.assertEqual(len(await page.evaluate(NAMES)), 6)

    async def test_a_namespace_and_a_state_are_chosen_and_stay_in_the_address(self) -> None:
        page = await self.open()
        choose = """(() => { const select = document.getElementById('namespace'); select.value = 'shop';
            select.dispatchEvent(new Event('input')); return location.search })()"""
        self.assertEqual(await page.evaluate(choose), "?namespace=shop")
        self.assertEqual(await page.evaluate(NAMES), ["shop/ill", "shop/queue"])
        await page.open(await page.evaluate("location.href"))
        self.assertEqual(await page.evaluate(NAMES), ["shop/ill", "shop/queue"])
        await page.open((await page.evaluate("location.origin")) + "/?state=booting")
        self.assertEqual(await page.evaluate(NAMES), [])

    async def test_by_keys_alone(self) -> None:
        page = await self.open()
        await self.press(page, "j", "j")
        self.assertEqual(await page.evaluate(FOCUSED), "shop/ill")
        await self.press(page, "ArrowDown")
        self.assertEqual(await page.evaluate(FOCUSED), "shop/queue")
        await self.press(page, "k", "k")
        self.assertEqual(await page.evaluate(FOCUSED), "shop/ill")
        await self.press(page, "/", "/")
        await self.type(page, "web")
        await self.press(page, "Enter", "\r")
        self.assertEqual(await page.evaluate(FOCUSED), "default/web-2")
        await self.press(page, "ArrowUp")
        self.assertEqual(await page.evaluate(FOCUSED), "default/web-2")
        await self.press(page, "Escape")
        self.assertEqual(await page.evaluate("document.activeElement.tagName"), "BODY")

    async def test_a_row_that_changes_keeps_the_focus(self) -> None:
        page = await self.open()
        await self.press(page, "j", "j")
        sandbox = self.world.node.inventory.sandbox(f"{9:032x}")
        sandbox.record = attrs.evolve(sandbox.record, message="another")
        text = "document.getElementById('pods').innerText.includes('another')"
        await self.until(page, text, True)
        self.assertEqual(await page.evaluate(FOCUSED), "shop/ill")

    async def test_dark_and_light_by_the_system_and_by_the_switch(self) -> None:
        page = await self.open()
        back = "getComputedStyle(document.body).backgroundColor"
        colours = {}
        for mode in ("light", "dark"):
            features = [{"name": "prefers-color-scheme", "value": mode}]
            await page.call("Emulation.setEmulatedMedia", features=features)
            colours[mode] = await page.evaluate(back)
        self.assertNotEqual(colours["light"], colours["dark"])
        await self.press(page, "d", "d")
        self.assertEqual(await page.evaluate(back), colours["light"])
        await page.open(await page.evaluate("location.href"))
        self.assertEqual(await page.evaluate(back), colours["light"], "it is kept")
        await page.evaluate("document.getElementById('mode').click()")
        self.assertEqual(await page.evaluate(back), colours["dark"])


class ManyPodsTests(LivePageCase):
    """Pauses of the page, and of the reactor: the harness fails a test in which a callback blocks it."""

    async def test_250_pods_that_change_are_followed_without_a_pause(self) -> None:
        sandboxes = [self.add(f"pod-{number}", number, f"space-{number % 7}") for number in range(250)]
        page = await self.open()
        await page.call("Performance.enable", timeDomain="threadTicks")
        await self.until(page, f"{NAMES}.length", 250)
        await self.press(page, "/", "/")
        spent = {}
        for number, letter in enumerate("pod-2"):
            before = await self.processor_seconds(page)
            await self.type(page, letter)
            spent[f"typing {letter}"] = await self.processor_seconds(page) - before
            for sandbox in sandboxes[number::5]:
                sandbox.failure = f"change {number}"
            before = await self.processor_seconds(page)
            await sleep(reactor, 1.5)
            spent[f"50 changes, {number}"] = await self.processor_seconds(page) - before
        await self.until(page, f"{NAMES}.length", 61)  # pod-2, and those from 20 and from 200 on
        self.assertLess(max(spent.values()), 0.2, spent)

    async def processor_seconds(self, page: Page) -> float:
        """Return how long the page's thread has had a processor so far."""
        metrics = (await page.call("Performance.getMetrics"))["metrics"]
        return float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))
