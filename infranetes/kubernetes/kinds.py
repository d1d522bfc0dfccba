# SPDX-License-Identifier: Apache-2.0
"""The handling of one kind of objects from the API server."""

from __future__ import annotations

import abc
import gc
import json
from collections.abc import Iterable, Mapping

from twisted.logger import Logger

from infranetes.kubernetes import fields
from infranetes.kubernetes.fields import Name
from infranetes.kubernetes.watch import Event, Json, Put, Removed, Replaced
from infranetes_common.errors import InvalidArgument

# The objects made from a list live long and have no cycles. The garbage collector would scan all of them
# again and again, for hundreds of milliseconds each time, so they are frozen after each LONG_LIVED objects.
LONG_LIVED = 1000

_log = Logger()


class Kind(abc.ABC):
    """One kind of objects.

    :cvar path: the kind's path at the API server.
    :cvar optional: whether an API server may lack the kind, or not show it to clients that see the others.
    :param selectors: select the objects, as query parameters of the API server.
    :ivar listed: whether a whole list has been handled.
    """

    path: str
    optional = False

    def __init__(self, selectors: Mapping[str, str] | None = None) -> None:
        self.selectors = selectors or {}
        self._objects: dict[Name, str] = {}
        self.listed = False

    @property
    def objects(self) -> list[str]:
        """The objects in use, trimmed, as JSON."""
        return list(self._objects.values())

    def trimmed(self, item: Json) -> Json:
        """Return the part of an object that `put` reads: a list holds all objects in memory at once."""
        return item

    @abc.abstractmethod
    def put(self, item: Json) -> Iterable[None] | None:
        """Handle an object that was added or changed.

        :return: the work that follows, done in small steps by iterating; None: treat the object as if it
            did not exist.
        :raise InvalidArgument: the object is not valid."""

    @abc.abstractmethod
    def remove(self, name: Name) -> Iterable[None]:
        """Handle an object that was deleted, or for which `put` returned None. Idempotent.

        :return: the work that follows, done in small steps by iterating."""

    def take(self, event: Event) -> Iterable[None]:
        """Handle an event, in small steps."""
        match event:
            case Put(item):
                yield from self._put(item)
            case Removed(item):
                yield from self._removed(fields.name(item))
            case Replaced(items):
                there = set()
                for number, item in enumerate(items, 1):
                    there.add(fields.name(item))
                    yield from self._put(item)
                    if number % LONG_LIVED == 0:
                        gc.freeze()
                    yield
                for name in tuple(self._objects):
                    if name not in there:
                        yield from self._removed(name)
                    yield
                self.listed = True

    def _put(self, item: Json) -> Iterable[None]:
        try:
            steps = self.put(item)
        except InvalidArgument as error:
            _log.warn("an object of Kubernetes can't be used and is left out: {error}", error=error)
            steps = None
        name = fields.name(item)
        if steps is None:
            yield from self._removed(name)
            return
        self._objects[name] = json.dumps(item)
        yield from steps

    def _removed(self, name: Name) -> Iterable[None]:
        self._objects.pop(name, None)
        yield from self.remove(name)
