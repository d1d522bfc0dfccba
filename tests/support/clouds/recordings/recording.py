# SPDX-License-Identifier: Apache-2.0
"""A recording: a file of JSON lines. The first describes it, and each of the others is a scrubbed call."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import attrs
import libcloud

from tests.support.clouds.recordings.scrub import Scrubber, field_of, is_harmless
from tests.support.clouds.recordings.shapes import Shape, shape
from tests.support.clouds.recordings.vocabulary import vocabulary
from tests.support.clouds.recordings.wire import Call, Exchange, Value, understood

FORMAT = 1
MOST_BYTES = 16 << 20  # of a file
_LONG = 5  # in a list with more members, only those that look different are kept


@attrs.frozen
class Recording:
    """A cloud's answers. :ivar of_life: whether the calls were made by `life`, in this order."""

    cloud: str
    calls: Sequence[Call]
    of_life: bool = True


def read(path: Path) -> Recording:
    """Read a file. :raise ValueError: it is not a recording, or is of an unknown format."""
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path.name} is longer than a recording can be")
    head, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    if head.get("recording") != FORMAT or head.get("cloud") not in ("aws", "gcp"):
        raise ValueError(f"{path.name} is no recording of format {FORMAT}: {str(head)[:100]}")
    return Recording(head["cloud"], [Call(**line) for line in lines])


def unknown_texts(recording: Recording) -> Iterator[str]:
    """Yield all texts in a recording that are not in the API's own description."""
    known = vocabulary(recording.cloud)

    def texts(field: str, value: Value) -> Iterator[str]:
        if isinstance(value, Mapping):
            for name, inner in value.items():
                if not is_harmless(known, name):
                    yield name
                yield from texts(field_of(name), inner)
        elif isinstance(value, str):
            if not known.is_value(field, value):
                yield value
        elif isinstance(value, Sequence):
            for inner in value:
                yield from texts(field, inner)

    for call in recording.calls:
        yield from texts("", call.asked)
        yield from texts("", call.answer)


class Recorder:
    """Write a recording as calls are made. Thread-safe.

    :ivar written: how many calls the file has. :ivar failures: why other calls are missing.
    """

    def __init__(self, cloud: str, path: Path) -> None:
        self._cloud = cloud
        self._scrubber = Scrubber(vocabulary(cloud))
        self._lock = threading.Lock()
        self._last: dict[str, Call] = {}  # by kind
        self._left = MOST_BYTES
        self.written = 0
        self.failures: set[str] = set()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("w")
        self._write({"recording": FORMAT, "cloud": cloud, "libcloud": libcloud.__version__})

    def hear(self, exchange: Exchange) -> None:
        """Record a call, unless the last one of its kind was the same. Never fails: the caller has created
        things in a cloud that must be destroyed."""
        try:
            with self._lock:
                self._record(exchange)
        except Exception as error:
            self.failures.add(type(error).__name__)

    def close(self) -> None:
        """End the recording."""
        with self._lock:
            self._file.close()

    def _record(self, exchange: Exchange) -> None:
        call = understood(self._cloud, exchange)
        if call is None:
            return
        scrubbed = self._scrubber.call(attrs.evolve(call, answer=condensed(call.answer)))
        if self._last.get(scrubbed.kind) != scrubbed:
            self._last[scrubbed.kind] = scrubbed
            self._write(attrs.asdict(scrubbed, recurse=False))
            self.written += 1

    def _write(self, line: Mapping[str, Any]) -> None:  # Any: JSON
        text = json.dumps(line) + "\n"
        if len(text) > self._left:
            raise OverflowError
        self._left -= len(text)
        self._file.write(text)
        self._file.flush()


def condensed(value: Value) -> Value:
    """Return a structure whose long lists keep only members that look different from those before them."""
    if isinstance(value, Mapping):
        return {name: condensed(inner) for name, inner in value.items()}
    if isinstance(value, str) or not isinstance(value, Sequence):
        return value
    members = [condensed(inner) for inner in value]
    if len(members) <= _LONG:
        return members
    kept, seen = list[Value](), dict[str, set[str]]()
    for member in members:
        if _adds(seen, shape(member)):
            kept.append(member)
    return kept


def _adds(seen: dict[str, set[str]], more: Shape) -> bool:
    """Add a shape to those seen. Return whether it had anything new."""
    new = [(path, forms) for path, forms in more.items() if not forms <= seen.get(path, set())]
    for path, forms in new:
        seen.setdefault(path, set()).update(forms)
    return bool(new)
