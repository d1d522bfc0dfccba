# SPDX-License-Identifier: Apache-2.0
"""The site in a browser: for every eye and hand, on every screen, in both modes."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from infranetes_common import __version__
from infranetes_common.concurrency import deferred
from infranetes_common.reactors import installed
from manual.__main__ import TREE, build
from tests.harness.durations import slow
from tests.harness.needs import Need, Tier, find_program, needs
from tests.support import axe
from tests.support.chromium import Chromium, Page

reactor = installed()

PAGES = (
    "index",
    "first-hour",
    "comparison",
    "configuration-2",
    "interfaces-volumes-and-snapshots",
    "CHANGELOG",
)
WIDTHS = (390, 820, 1440)


@slow(90, "a browser looks at each of some pages, in both modes, at three widths")
@needs(
    Need("Chromium", "make test-page", Tier.NIGHTLY, lambda: find_program("chromium") is not None), axe.NEED
)
class SiteInBrowserTests(TestCase):
    timeout = 900

    async def page(self) -> Page:
        profile = tempfile.mkdtemp(prefix="chromium-")
        self.addCleanup(shutil.rmtree, profile, True)
        browser = Chromium.start(reactor, profile)
        self.addCleanup(deferred(browser.end))
        return await browser.page()

    async def test_nobody_is_kept_from_using_it_and_nothing_is_fetched_elsewhere(self) -> None:
        site = Path(self.mktemp()).absolute()
        site.mkdir()
        work = Path(self.mktemp()).absolute()
        self.assertEqual(await deferToThread(build, TREE, site, work), [])
        page, found = await self.page(), {}
        for mode in ("light", "dark"):
            features = [{"name": "prefers-color-scheme", "value": mode}]
            await page.call("Emulation.setEmulatedMedia", features=features)
            for name in PAGES:
                await page.be(WIDTHS[-1], 900)
                await page.open(f"file://{site}/{__version__}/{name}.html")
                found[f"{name}, {mode}"] = await axe.faults(reactor, page)
                for width in WIDTHS:
                    await page.be(width, 900)
                    wide = await page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
                    self.assertLessEqual(wide, 0, f"{name} at {width}")
        self.assertEqual({where: told for where, told in found.items() if told}, {})
        self.assertEqual([each for each in page.requests if not each.startswith(("file:", "data:"))], [])
        self.assertEqual(page.complaints, [])
