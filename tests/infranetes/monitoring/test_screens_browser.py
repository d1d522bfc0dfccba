# SPDX-License-Identifier: Apache-2.0
"""The page with a VM's screen in a browser: Debian's Chromium and noVNC, and a screen that speaks RFB."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from infranetes.monitoring.screens import NOVNC
from infranetes_common.concurrency import deferred
from infranetes_common.reactors import installed
from tests.harness.needs import Need, Tier, find_program, needs
from tests.infranetes.monitoring.test_screens import SECRET, PageCase
from tests.support.chromium import Chromium, Page
from tests.support.rfb import RfbServer
from tests.support.waiting import until

reactor = installed()
RED = (255, 0, 0)
STATUS = "document.getElementById('status')?.textContent"
#: The colour in the middle of noVNC's canvas.
COLOUR = """(() => { const canvas = document.querySelector('#screen canvas');
    const [x, y] = [canvas.width / 2, canvas.height / 2];
    return [...canvas.getContext('2d').getImageData(x, y, 1, 1).data.slice(0, 3)]; })()"""


@needs(
    Need("Chromium", "make test-page", Tier.NIGHTLY, lambda: find_program("chromium") is not None),
    Need("noVNC", "make test-page", Tier.NIGHTLY, (NOVNC / "core").exists),
)
class BrowserTests(PageCase):
    timeout = 120

    async def setUp(self) -> None:
        await super().setUp()
        self.serving._screens.novnc = NOVNC
        self.rfb = RfbServer(RED)
        await self.listen("rfb", self.rfb)
        self.view("rfb")

    async def page(self) -> Page:
        profile = tempfile.mkdtemp(prefix="chromium-")
        self.addCleanup(shutil.rmtree, profile, True)
        browser = Chromium.start(reactor, profile)
        self.addCleanup(deferred(browser.end))
        return await browser.page()

    async def test_a_person_sees_the_screen_and_types(self) -> None:
        page = await self.page()
        # With a name and a password in it, as a browser has them once it has asked for them.
        await page.open(f"http://admin:{SECRET}@127.0.0.1:{self.port}/screens/default/web")
        while (status := await page.evaluate(STATUS)) == "connecting":
            pass
        self.assertEqual(status, "connected")
        while (colour := await page.evaluate(COLOUR)) == [0, 0, 0]:
            pass
        self.assertEqual(tuple(colour), RED)
        await page.evaluate("document.querySelector('#screen canvas').focus()")
        for kind in ("keyDown", "keyUp"):
            await page.call("Input.dispatchKeyEvent", type=kind, key="x", code="KeyX", text="x")
        await until(lambda: ord("x") in self.rfb.keys, "the key arrives")
        await page.evaluate("document.getElementById('keys').click()")
        await until(lambda: 0xFFFF in self.rfb.keys, "Ctrl-Alt-Del arrives")
        errors = [each for each in page.complaints if each.startswith("error")]
        self.assertEqual(errors, [])

    async def test_a_lost_connection_is_told_and_made_again(self) -> None:
        page = await self.page()
        await page.open(f"http://admin:{SECRET}@127.0.0.1:{self.port}/screens/web")
        while await page.evaluate(STATUS) != "connected":
            pass
        self.serving._screens.stop()
        while await page.evaluate(STATUS) == "connected":
            pass
        self.assertIs(await page.evaluate("document.getElementById('again').hidden"), False)
        await page.evaluate("document.getElementById('again').click()")
        while await page.evaluate(STATUS) != "connected":
            pass
        self.assertEqual(Path(str(await page.evaluate("location.pathname"))), Path("/screens/web"))
