# SPDX-License-Identifier: Apache-2.0
"""Scrub a cloud's requests and answers: everything that is not known to be harmless is replaced.

A placeholder looks like what it replaces (a number, a date, an id of a volume), and replaces the same thing
throughout the recording.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address
from itertools import pairwise

import attrs

from tests.support.clouds.recordings.vocabulary import OWN, Vocabulary
from tests.support.clouds.recordings.wire import UNREADABLE, Call, Value

EMPTY, FLAG, NUMBER, DATE, TEXT = "nothing", "yes or no", "number", "date", "text"
ADDRESS4, ADDRESS6, MAC = "IPv4 address", "IPv6 address", "MAC address"
NAMESPACE, LINK, NAME = "namespace", "link", "name"
_FORMS = (
    (FLAG, re.compile(r"true|false")),
    (NUMBER, re.compile(r"-?[0-9]+(\.[0-9]+)?")),
    (DATE, re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:?\d\d)")),
    (ADDRESS4, re.compile(r"\d{1,3}(\.\d{1,3}){3}")),
    (MAC, re.compile(r"[0-9a-fA-F]{2}(:[0-9a-fA-F]{2}){5}")),
    (ADDRESS6, re.compile(r"[0-9a-fA-F]{0,4}(:[0-9a-fA-F]{0,4}){2,7}")),
    (NAMESPACE, re.compile(r"https?://[a-z0-9]+\.amazonaws\.com/doc/\d{4}-\d\d-\d\d/?")),
    (LINK, re.compile(r"(?:https?://|projects/)\S+")),
)
# The prefixes of EC2's ids, of which there are short and long ones.
_ID = re.compile(
    r"(ami|aki|ari|eipalloc|eipassoc|eni|eni-attach|i|key|lt|r|rtb|sg|sgr|sir|snap|subnet|vol|vpc)"
    r"-([0-9a-f]{8}|[0-9a-f]{17})"
)
_BENCHMARKS = int(IPv4Address("198.18.0.0"))  # not used by machines (RFC 2544), nor is the next (RFC 3849)
_DOCUMENTATION = int(IPv6Address("2001:db8::"))
_DIGIT = re.compile(r"[0-9]")
_MEMBER = re.compile(r"[0-9]{1,3}")  # the number of a list's member in a form


def form_of(text: str) -> str:
    """Return what a text looks like; ids of EC2 look like `vol-…`."""
    if not text:
        return EMPTY
    found = _ID.fullmatch(text)
    if found is not None:
        return f"{found[1]}-…"
    return next((form for form, pattern in _FORMS if pattern.fullmatch(text)), TEXT)


@attrs.frozen
class Scrubber:
    """Scrubs one recording."""

    _vocabulary: Vocabulary
    _placeholders: dict[tuple[str, str], str] = attrs.field(factory=dict, repr=False)

    def call(self, call: Call) -> Call:
        """Return a call without anything that isn't known to be harmless."""
        kind = call.kind if call.kind in self._vocabulary.kinds else ""
        asked, answer = self.value("", call.asked), self.value("", call.answer)
        return Call(kind, asked, call.status, call.content_type, answer)

    def value(self, field: str, value: Value) -> Value:
        """Return a scrubbed structure. :param field: the field that has this value."""
        if isinstance(value, Mapping):
            return {self._key(name): self.value(field_of(name), inner) for name, inner in value.items()}
        if isinstance(value, str):
            return self._text(field, value)
        if isinstance(value, Sequence):
            return [self.value(field, inner) for inner in value]
        if value is None or isinstance(value, bool):
            return value
        if self._vocabulary.is_number(field, str(value).lstrip("-")):
            return value
        return 0 if isinstance(value, int) else 0.0

    def _key(self, name: str) -> str:
        return name if is_harmless(self._vocabulary, name) else self._placeholder(NAME, name)

    def _text(self, field: str, text: str) -> str:
        form = form_of(text)
        if form in (EMPTY, FLAG) or text == UNREADABLE or self._vocabulary.is_value(field, text):
            return text
        if form == NUMBER and self._vocabulary.is_number(field, text.lstrip("-")):
            return text
        if form == DATE:
            return _DIGIT.sub("0", text)
        return self._placeholder(form, text)

    def _placeholder(self, form: str, text: str) -> str:
        known = self._placeholders.get((form, text))
        if known is None:
            number = 1 + sum(each == form for each, _ in self._placeholders)
            known = self._placeholders[form, text] = _made(form, number, text)
        return known


def _made(form: str, number: int, text: str) -> str:
    """Return the placeholder of this number."""
    if form == NUMBER:
        return str(number)
    if form == ADDRESS4:
        return str(IPv4Address(_BENCHMARKS + number))
    if form == ADDRESS6:
        return str(IPv6Address(_DOCUMENTATION + number))
    if form == MAC:
        return "02:" + number.to_bytes(5, "big").hex(":")
    if form == NAMESPACE:
        return f"http://ec2.amazonaws.com/doc/0000-00-00{'/' if text.endswith('/') else ''}"
    if form == LINK:
        return f"https://link.invalid/{number}"
    if form.endswith("-…"):
        digits = len(text) - len(form) + 1
        return f"{form[:-1]}{number:0{digits}x}"
    return f"{form}-{number}"


def is_harmless(vocabulary: Vocabulary, name: str) -> bool:
    """Return whether a field's name, perhaps one in a form, can be shown. In forms, numbers follow names."""
    parts = name.split(".")
    names = [not _MEMBER.fullmatch(part) for part in parts]
    pairs = pairwise([False, *names])
    return name in OWN or all(
        vocabulary.is_name(part) if named else before
        for part, (before, named) in zip(parts, pairs, strict=True)
    )


def field_of(name: str) -> str:
    """Return the field at the end of a name in a form, or the name itself if it is not of that kind."""
    return next((part for part in reversed(name.split(".")) if not _MEMBER.fullmatch(part)), "")
