# SPDX-License-Identifier: Apache-2.0
"""Pages get what they lack for those who use them without eyes or without a mouse."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from manual.accessible import repaired


class RepairTests(SynchronousTestCase):
    def test_what_axe_tells_of_is_there_afterwards_and_once(self) -> None:
        for lacking, whole in (
            ('<p class="caption" role="heading">', '<p class="caption" role="heading" aria-level="2">'),
            ('<aside class="sidebar-drawer">', '<aside class="sidebar-drawer" aria-label="All pages">'),
            (
                '<aside class="toc-drawer no-toc">',
                '<aside class="toc-drawer no-toc" aria-label="On this page">',
            ),
            ('<th class="head"><p></p></th>', '<td class="head"></td>'),
            ('<div class="highlight"><pre>', '<div class="highlight"><pre tabindex="0">'),
        ):
            self.assertEqual(repaired(lacking), whole)
            self.assertEqual(repaired(whole), whole)

    def test_nothing_else_is_touched(self) -> None:
        page = '<th class="head"><p>A</p></th><pre>x</pre><p class="caption">y</p>'
        self.assertEqual(repaired(page), page)
