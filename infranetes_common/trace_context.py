# SPDX-License-Identifier: Apache-2.0
"""The trace that a call belongs to, read from its metadata (source: W3C Trace Context).

Malformed values are ignored, as the standard demands: a caller's tracing never fails its call.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import attrs

Pairs = Iterable[tuple[str, str | bytes]]

PARENT, STATE = "traceparent", "tracestate"
MAX_STATE_CHARACTERS = 512
MAX_STATE_MEMBERS = 32

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[\x20-\x7e]*)?")
_KEY = r"(?:[a-z][_0-9a-z\-*/]{0,255}|[a-z0-9][_0-9a-z\-*/]{0,240}@[a-z][_0-9a-z\-*/]{0,13})"
_MEMBER = re.compile(rf"({_KEY})=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{{0,255}}[\x21-\x2b\x2d-\x3c\x3e-\x7e]")
_VERSION, _UNUSED_VERSION = "00", "ff"
_SAMPLED = 0x01


@attrs.frozen
class TraceContext:
    """A span, in the form that is passed to the servers that are called on its behalf.

    :ivar trace_id: 32 hexadecimal digits. :ivar span_id: 16 hexadecimal digits.
    :ivar sampled: True if the trace is recorded.
    :ivar state: data that tracing systems add for each other; "" for none.
    """

    trace_id: str
    span_id: str
    sampled: bool = False
    state: str = ""

    @classmethod
    def parse(cls, parent: str, state: str = "") -> TraceContext | None:
        """Read the values of both headers. :return: None: they name no trace.

        :param state: the values of all `tracestate` headers, with commas between."""
        found = _PARENT.fullmatch(parent) if len(parent) <= MAX_STATE_CHARACTERS else None
        if found is None:
            return None
        version, trace_id, span_id, flags, more = found.groups()
        if version == _UNUSED_VERSION or (version == _VERSION and more is not None):
            return None
        if not trace_id.strip("0") or not span_id.strip("0"):
            return None
        return cls(trace_id, span_id, bool(int(flags, 16) & _SAMPLED), _checked_state(state))

    @classmethod
    def of_metadata(cls, metadata: Pairs) -> TraceContext | None:
        """Read a call's metadata. :return: None: it names no trace, or several."""
        parents: list[str] = []
        states: list[str] = []
        for name, value in metadata:
            if isinstance(value, str) and name in (PARENT, STATE):
                (parents if name == PARENT else states).append(value)
        return cls.parse(parents[0].strip(), ",".join(states)) if len(parents) == 1 else None

    @property
    def parent(self) -> str:
        """The value of `traceparent`."""
        return f"{_VERSION}-{self.trace_id}-{self.span_id}-{int(self.sampled):02x}"

    def to_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata for a call on behalf of this span."""
        parent = ((PARENT, self.parent),)
        return (*parent, (STATE, self.state)) if self.state else parent


def _checked_state(state: str) -> str:
    """Return `state` if it is well-formed and not too long, else "": the trace is good without it."""
    if len(state) > MAX_STATE_CHARACTERS:
        return ""
    members = [member.strip(" \t") for member in state.split(",")]
    matches = [_MEMBER.fullmatch(member) for member in members if member]
    keys = [match[1] for match in matches if match is not None]
    if len(keys) < len(matches) or len(keys) > MAX_STATE_MEMBERS or len(set(keys)) < len(keys):
        return ""
    return ",".join(member for member in members if member)
