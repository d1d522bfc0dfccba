# SPDX-License-Identifier: Apache-2.0
"""Following one kind of objects at the API server, without I/O: what to ask for and what an answer means.

Source: Kubernetes' API concepts ("Efficient detection of changes", "Streaming lists"); client-go's reflector.

state      asks for                             an answer leads to
STREAMING  a watch that begins with all         FOLLOWING at the bookmark that ends these; LISTING if the
           objects (a streaming list)           server has no streaming lists
LISTING    a page of all objects, or the next   itself, while there are further pages; then FOLLOWING. If
           page                                 the server has forgotten the version of the pages, itself:
                                                the list begins again, without pages
FOLLOWING  changes since the last version       itself, when the answer ends; STREAMING or LISTING if the
           that was received                    server does not know that version any more

The caller makes the request that `request` returns. It passes each line of a watch's answer to `line`, or
each piece of a list's answer to `piece`, and calls `page` at the end of a list, `refused` after a refusal and
`ended` at the end of every answer. The objects received stay valid until a whole list replaces them.

Version 0 of a list is the state in the server's memory. Servers that can't split that into pages answer with
all objects, which are read one by one as they arrive.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

import attrs
from twisted.logger import Logger

from infranetes.kubernetes.listing import ListReader
from infranetes_common.bounded_json import check
from infranetes_common.concurrency import backoff

WATCH_SECONDS = 300.0  # the server ends a watch after so long, or up to twice that
INITIAL_END = "k8s.io/initial-events-end"
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds between two failed attempts
MOST_VALUES = 500_000  # of one event: etcd's objects of 1.5 MiB have fewer
PAGE = 500  # objects asked for at a time
EXPIRED, INVALID = 410, (400, 404, 422)
TOO_LARGE = "Too large resource version"  # from a server with another history, or one that has just started

_log = Logger()

Json = Mapping[str, Any]  # Any: an object of the API, which `objects` checks


class State(enum.Enum):
    STREAMING = "streaming"
    LISTING = "listing"
    FOLLOWING = "following"


@attrs.frozen
class Put:
    """An object exists, or has changed."""

    object: Json


@attrs.frozen
class Removed:
    """An object was deleted or is no longer selected. This is its last state."""

    object: Json


class Packed(Sequence[Json]):
    """Many objects, kept as text until they are read: that takes a tenth of the memory and gives the garbage
    collector nothing to scan."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = list(texts)

    def __len__(self) -> int:
        return len(self._texts)

    @overload
    def __getitem__(self, place: int) -> Json: ...

    @overload
    def __getitem__(self, place: slice) -> Packed: ...

    def __getitem__(self, place: int | slice) -> Json | Packed:
        if isinstance(place, slice):
            return Packed(self._texts[place])
        found: Json = json.loads(self._texts[place])
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]  # as of a list


@attrs.frozen
class Replaced:
    """A whole list: these are all objects."""

    objects: Sequence[Json]


Event = Put | Removed | Replaced


@attrs.frozen
class Request:
    """The query of a request.

    :ivar watch: whether the answer has a line for each event; else it is a list."""

    query: Mapping[str, str]
    watch: bool


class Watch:
    """The state of following one kind of objects; see the table above.

    :param selectors: `labelSelector` and `fieldSelector`, or neither.
    :param random: returns a number from 0 to 1, as random.random does.
    :param trimmed: returns the part of an object to keep, including its name.
    :ivar current: whether all objects up to some version have been received.
    """

    def __init__(
        self,
        selectors: Mapping[str, str],
        random: Callable[[], float],
        trimmed: Callable[[Json], Json] = lambda item: item,
    ) -> None:
        self._selectors = selectors
        self._random = random
        self._trimmed = trimmed
        self._first = self._state = State.STREAMING
        self._version = ""
        self._initial: dict[tuple[str, str], str] = {}  # the objects of the present list so far
        self._reader = ListReader(self._add)
        self._next_page = ""  # the server's token for it
        self._pages_version = ""
        self._paged = True
        self._progress = False  # whether this answer has brought anything
        self._renew_pauses()
        self.current = False

    @property
    def following(self) -> bool:
        """Whether changes are being received as they happen."""
        return self._state is State.FOLLOWING

    def request(self) -> Request:
        """Return the next request to make."""
        self._progress = False
        if self._state is State.LISTING:
            return Request(self._page_query(), False)
        self._initial = {}
        seconds = str(int(WATCH_SECONDS * (1 + self._random())))
        watching = {"watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": seconds}
        if self._state is State.STREAMING:
            watching |= {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}
        return Request({**self._selectors, **watching, "resourceVersion": self._version}, True)

    def _page_query(self) -> Mapping[str, str]:
        self._reader = ListReader(self._add)
        query = {**self._selectors, "limit": str(PAGE)} if self._paged else {**self._selectors}
        if self._next_page:
            return {**query, "continue": self._next_page}  # of the first page's version
        self._initial = {}
        return {**query, "resourceVersion": "0"}

    def piece(self, data: bytes) -> None:
        """Take a piece of the answer to a list. :raise ValueError: the answer is not a list."""
        self._reader.feed(data)

    def page(self) -> Sequence[Event]:
        """Handle the end of the answer to a list. :raise ValueError: the answer is not a list."""
        content = self._reader.end()
        if content.get("items") is not None:
            raise ValueError("its items are no list")
        version = _version(content)
        if not self._next_page:
            self._pages_version = version
        self._next_page = str(_object(content["metadata"]).get("continue") or "")
        if self._next_page:
            self._progress = True
            return []
        return self._whole(self._pages_version)

    def _whole(self, version: str) -> Sequence[Event]:
        """Handle the arrival of all objects, as they were at a version."""
        objects, self._initial = Packed(self._initial.values()), {}
        self._paged = True
        self._follow(version)
        return [Replaced(objects)]

    def _add(self, thing: object) -> None:
        try:
            item = _object(thing)
            key = _key(item)
        except ValueError as error:
            _left_out(error)
        else:
            self._initial[key] = json.dumps(self._trimmed(item))

    def line(self, line: bytes) -> Sequence[Event]:
        """Handle one line of the answer to a watch. :raise ValueError: the line is not an event.

        An event of something that is no object is left out: asked again, the server would send it again."""
        try:
            check(line, MOST_VALUES)
        except ValueError as error:
            _left_out(error)
            return []
        try:
            event = _object(json.loads(line))
        except RecursionError:
            raise ValueError("an event is too deep") from None
        kind, value = event.get("type"), event.get("object")
        if kind == "ERROR":
            status = _object(value)
            self.refused(int(status.get("code") or 0), str(status.get("message")))
            return []
        if kind not in ("ADDED", "MODIFIED", "DELETED", "BOOKMARK"):
            raise ValueError(f"there is no event of type {str(kind)[:40]!r}")
        try:
            thing = _object(value)
            version = _version(thing)
        except ValueError as error:
            _left_out(error)
            return []
        if self._state is State.STREAMING:
            return self._initially(kind, thing, version)
        self._follow(version)
        if kind == "BOOKMARK":
            return []
        thing = self._trimmed(thing)
        return [Removed(thing) if kind == "DELETED" else Put(thing)]

    def _initially(self, kind: str, thing: Json, version: str) -> Sequence[Event]:
        about = _object(thing.get("metadata"))
        if kind == "BOOKMARK":
            if _object(about.get("annotations") or {}).get(INITIAL_END) != "true":
                return []
            return self._whole(version)
        if kind == "DELETED":
            self._initial.pop(_key(thing), None)
        else:
            self._add(thing)
        return []

    def ended(self) -> float:
        """Handle the end of an answer, or its failure. Return the seconds to wait before the next request."""
        return 0.0 if self._progress else next(self._pauses)

    def refused(self, status: int, why: str = "") -> None:
        """Handle a refusal by the server, by its HTTP status or by an event within an answer."""
        if self._state is State.LISTING and self._next_page:
            if status == EXPIRED or status in INVALID:
                self._next_page, self._paged = "", False
                self._progress = True
        elif (
            status == EXPIRED
            or TOO_LARGE in why
            or (status in INVALID and self._state is not State.STREAMING)
        ):
            self._begin_again()
        elif status in INVALID:
            self._first = self._state = State.LISTING

    def _begin_again(self) -> None:
        self._state, self._version = self._first, ""

    def _follow(self, version: str) -> None:
        self._state, self._version = State.FOLLOWING, version
        self.current = self._progress = True
        self._renew_pauses()

    def _renew_pauses(self) -> None:
        self._pauses = backoff(FIRST_PAUSE, LONGEST_PAUSE, jitter=0.5, chance=self._random)


def _left_out(error: ValueError) -> None:
    _log.warn("an object of Kubernetes can't be read and is left out: {error}", error=str(error))


def _object(value: object) -> Json:
    if not isinstance(value, dict):
        raise ValueError(f"{str(value)[:40]!r} is no object")
    return value


def _key(thing: Json) -> tuple[str, str]:
    about = _object(thing.get("metadata"))
    return str(about.get("namespace")), str(about.get("name"))


def _version(thing: Json) -> str:
    version = _object(thing.get("metadata")).get("resourceVersion")
    if not isinstance(version, str) or not version:
        raise ValueError("it has no resourceVersion")
    return version
