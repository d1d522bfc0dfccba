# SPDX-License-Identifier: Apache-2.0
"""How long a page takes to read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

WORDS_A_MINUTE = 220
MOST_MINUTES = 10
# Pages that nobody reads from top to bottom, and why.
REFERENCES = {"CHANGELOG.md": "a list of changes, in which one looks up a release"}
_NOT_READ = (
    re.compile(r"^(`{3,}).*?^\1`*$", re.MULTILINE | re.DOTALL),
    re.compile(r"(?:^ {4}.*\n)+", re.MULTILINE),  # commands and files, which are looked at
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"(?<=\])\([^)]*\)"),
    re.compile(r"^\|[-| :]+\|$", re.MULTILINE),
)
_WORD = re.compile(r"[\w`][^\s|]*")


def words(text: str) -> int:
    """Return how many words of a page are read: its prose and its tables."""
    for each in _NOT_READ:
        text = each.sub("", text)
    return len(_WORD.findall(text))


def too_long(pages: Mapping[str, str]) -> Iterator[str]:
    """Return a line for each page that takes more than ten minutes to read, and is no reference.

    :param pages: their texts by their names."""
    for name, text in pages.items():
        minutes = words(text) / WORDS_A_MINUTE
        if minutes > MOST_MINUTES and name not in REFERENCES:
            yield (
                f"{name} takes {minutes:.1f} minutes to read, more than {MOST_MINUTES}: move what belongs "
                "together to a page of its own, and link to that in the same item of docs/index.md"
            )
