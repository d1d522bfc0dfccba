# SPDX-License-Identifier: Apache-2.0
"""What becomes of the objects of one kind that come from the API server."""

from __future__ import annotations

import abc
import gc
from collections.abc import Iterable, Mapping

from twisted.logger import Logger

from infranetes.kubernetes import fields
from infranetes.kubernetes.fields import Name
from infranetes.kubernetes.watch import Event, Json, Put, Removed, Replaced
from infranetes_common.errors import InvalidArgument

# What comes of a list lives long and has no cycles. The garbage collector would look at all of it again
# and again, for hundreds of milliseconds each time; after each so many objects it is told to leave them out.
LONG_LIVED = 1000

_log = Logger()


class Kind(abc.ABC):
    """One kind of objects.

    :cvar path: where the API server has them.
    :cvar optional: not every API server has the kind, or shows it to everybody who may see the others.
    :param selectors: of those that are asked for, as the API server takes them.
    :ivar listed: whether all that there are have been put.
    """

    path: str
    optional = False

    def __init__(self, selectors: Mapping[str, str] | None = None) -> None:
        self.selectors = selectors or {}
        self._names: set[Name] = set()
        self.listed = False

    def trimmed(self, item: Json) -> Json:
        """Return what of an object `put` reads, as all objects are in memory at once when they are listed."""
        return item

    @abc.abstractmethod
    def put(self, item: Json) -> Iterable[None] | None:
        """Handle an object that was added or changed.

        :return: the work that follows, to be iterated over in small steps; None: the object is treated as if
            it did not exist.
        :raise InvalidArgument: it is no such object."""

    @abc.abstractmethod
    def remove(self, name: Name) -> Iterable[None]:
        """Handle an object that was deleted, or that `put` returned None for. Iterate over the result to do
        the work in small steps. Idempotent."""

    def take(self, event: Event) -> Iterable[None]:
        """Take an event, in small steps."""
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
                for name in tuple(self._names):
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
        self._names.add(name)
        yield from steps

    def _removed(self, name: Name) -> Iterable[None]:
        self._names.discard(name)
        yield from self.remove(name)
