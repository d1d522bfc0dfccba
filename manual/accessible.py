# SPDX-License-Identifier: Apache-2.0
"""What the generator's pages lack for those who use them without eyes or without a mouse; axe tells of it."""

from __future__ import annotations

import re

_REPAIRS = (
    # The navigation's captions are headings, of a level.
    (r'(<p class="caption" role="heading")>', r'\1 aria-level="2">'),
    # Two regions beside the page have names by which they are told apart.
    (r'<aside class="sidebar-drawer">', '<aside class="sidebar-drawer" aria-label="All pages">'),
    (r'<aside class="(toc-drawer[^"]*)">', r'<aside class="\1" aria-label="On this page">'),
    # The corner of a table is no head of anything.
    (r"<th class=\"head([^\"]*)\">(?:<p></p>)?</th>", r'<td class="head\1"></td>'),
    # What scrolls sideways does so by keys too.
    (r'(<div class="highlight">)<pre>', r'\1<pre tabindex="0">'),
)


def repaired(page: str) -> str:
    """Return a page with what it lacked. Idempotent."""
    for pattern, replacement in _REPAIRS:
        page = re.sub(pattern, replacement, page)
    return page
