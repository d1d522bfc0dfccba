# SPDX-License-Identifier: Apache-2.0
"""Secrets that must not leave a node: they are taken out of texts, however they are written there."""

from __future__ import annotations

import base64
import binascii
import html
import json
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from urllib.parse import quote, quote_plus

from infranetes.ctl.secrets.keys import mapped
from infranetes_common.redaction import PEM_KEY, blotted, spans

SHORTEST = 6  # characters; texts are not searched for shorter secrets, which would be in every one
_SHORTEST_LINE = 16  # characters of a key's line that is searched for on its own
# Values that are no secrets, although their keys sound so.
_PLAIN = {"bearer", "basic", "password", "secret", "default", "enabled", "disabled", "required", "(hidden)"}
_PEM_MARK = re.compile(r"-+(?:(?:BEGIN|END)[A-Z0-9 ]*-*)?")
_SCHEME = re.compile(r"(?:Bearer|Basic|Token)[ \t]+", re.IGNORECASE)


class Scrubber:
    """Takes secrets out of texts: those that are known, and whatever looks like one."""

    def __init__(self, secrets: Iterable[str]) -> None:
        values = {each for value in secrets for each in _meant(value.strip())}
        shapes = {shape for value in values if _is_worth(value) for shape in _shapes(value)}
        written = [each for each in shapes if len(each) >= SHORTEST]
        self._secrets = _any_of(written) if written else None

    def clean(self, text: str) -> str:
        """Return the text without secrets.

        What is known and what looks so is found in the same text: neither takes from the other what it is
        recognised by."""
        known = [] if self._secrets is None else [found.span(1) for found in self._secrets.finditer(text)]
        return blotted(text, [*known, *spans(text)])

    def clean_document(self, document: object) -> object:
        """Return a JSON document without secrets in any text."""
        return mapped(document, self.clean)


def _is_worth(value: str) -> bool:
    return len(value) >= SHORTEST and value.lower() not in _PLAIN and not _PEM_MARK.fullmatch(value)


def _meant(value: str) -> Iterator[str]:
    """Yield a value, and those within it: without its scheme, from its base64, the lines of a key."""
    for each in (value, _SCHEME.sub("", value, count=1)):
        for text in (each, _decoded(each)):
            yield text
            for key in PEM_KEY.finditer(text):
                yield key[0]
                lines = (line.strip() for line in re.split(r"\s|\\n", key[0]))
                yield from (line for line in lines if len(line) >= _SHORTEST_LINE)


def _decoded(value: str) -> str:
    try:
        text = base64.b64decode(value, validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
    return text.strip() if all(each.isprintable() or each.isspace() for each in text) else ""


def _shapes(value: str) -> Iterator[str]:
    """Yield a value as it may be written: in JSON, in URLs, in HTML, in a log's one line, in base64."""
    escaped = "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in value
    )
    for text in (value, escaped, " ".join(value.split())):
        yield text
        yield repr(text)[1:-1]
        for ascii_only in (True, False):
            once = json.dumps(text, ensure_ascii=ascii_only)[1:-1]
            yield once
            yield json.dumps(once, ensure_ascii=ascii_only)[1:-1]
    for encoded in (quote(value), quote(value, safe=""), quote_plus(value)):
        yield encoded
        yield re.sub("%[0-9A-F]{2}", lambda found: found[0].lower(), encoded)
    yield html.escape(value)
    yield from _in_base64(value.encode())


def _in_base64(value: bytes) -> Iterator[str]:
    """Yield what a value always is in base64, wherever in a longer one it begins."""
    for before in range(3):
        coded = base64.b64encode(bytes(before) + value).decode()
        whole = (before + len(value)) * 8 // 6  # characters that what comes after does not change
        begin = -(-before * 8 // 6)
        if before == 0:
            yield coded.rstrip("=")
        if whole - begin >= SHORTEST:
            yield coded[begin:whole]
            yield coded[begin:whole].replace("+", "-").replace("/", "_")


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of the places where one of the texts stands; its group is the longest.

    Ordered by their first character, they are many times faster to search for."""
    parts = []
    for first, group in groupby(sorted(texts), key=lambda text: text[0]):
        rests = (re.escape(text[1:]) for text in sorted(group, key=len, reverse=True))
        parts.append(f"{re.escape(first)}(?:{'|'.join(rests)})")
    return re.compile(f"(?=({'|'.join(parts)}))")
