# SPDX-License-Identifier: Apache-2.0
"""axe, which finds what some people can't use of a page: `tests/interop/axe` fetches it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

from tests.harness.needs import Need, Tier
from tests.support.chromium import Page

SCRIPT = Path(__file__).resolve().parents[2] / "build/tools/axe/axe.min.js"
NEED = Need("axe", "make test-page", Tier.NIGHTLY, SCRIPT.exists)
_RUN = """(() => { window.found = null; axe.run(document, {iframes: false, preload: false}).then(
    told => { window.found = told.violations.map(each => ({rule: each.id, where:
        each.nodes.slice(0, 5).map(node => node.target.join(' ') + ': ' + node.failureSummary)})) },
    error => { window.found = [{rule: String(error), where: []}] }) })()"""
_POLL_SECONDS, _SECONDS = 0.1, 60.0


async def faults(reactor: IReactorTime, page: Page) -> Sequence[Mapping[str, object]]:
    """Return what axe finds in a page that is loaded: the rules, and where they are broken."""
    await page.evaluate(SCRIPT.read_text() + ";0")
    await page.evaluate(_RUN)
    waited = 0.0
    while (found := await page.evaluate("window.found")) is None:
        if waited > _SECONDS:
            raise AssertionError(f"axe did not end within {_SECONDS:.0f} s")
        await deferLater(reactor, _POLL_SECONDS)
        waited += _POLL_SECONDS
    return list(found)
