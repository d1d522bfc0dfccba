# SPDX-License-Identifier: Apache-2.0
"""The kinds of objects that are followed, and how each gets into the table."""

from __future__ import annotations

from collections.abc import Iterable

from twisted.logger import Logger

from infranetes.services import objects
from infranetes.services.objects import Name
from infranetes.services.table import Table
from infranetes.services.watch import Event, Json, Put, Removed, Replaced
from infranetes_common.errors import InvalidArgument

_log = Logger()


class Kind:
    """One kind of objects. :ivar listed: whether all that there are have been put into the table."""

    path: str

    def __init__(self, table: Table) -> None:
        self._table = table
        self._names: set[Name] = set()
        self.listed = False

    def selectors(self, node: str) -> dict[str, str]:
        """The selectors of its objects, as the API server takes them."""
        raise NotImplementedError

    def put(self, item: Json) -> bool:
        """Put an object into the table. False: no proxy serves it. :raise InvalidArgument: it is none."""
        raise NotImplementedError

    def remove(self, name: Name) -> None:
        """Remove an object from the table. Idempotent."""
        raise NotImplementedError

    def take(self, event: Event) -> Iterable[None]:
        """Put an event into the table, in small steps."""
        match event:
            case Put(item):
                self._put(item)
            case Removed(item):
                self._removed(objects.name(item))
            case Replaced(items):
                for item in items:
                    self._put(item)
                    yield
                for gone in self._names - {objects.name(item) for item in items}:
                    self._removed(gone)
                    yield
                self.listed = True

    def _put(self, item: Json) -> None:
        try:
            there = self.put(item)
        except InvalidArgument as error:
            _log.warn("an object of Kubernetes can't be used and is left out: {error}", error=error)
            there = False
        if there:
            self._names.add(objects.name(item))
        else:
            self._removed(objects.name(item))

    def _removed(self, name: Name) -> None:
        self._names.discard(name)
        self.remove(name)


class Services(Kind):
    """Services with addresses that no other proxy serves."""

    path = "/api/v1/services"

    def selectors(self, node: str) -> dict[str, str]:
        return {"labelSelector": f"!{objects.PROXY_NAME}", "fieldSelector": "spec.clusterIP!=None"}

    def put(self, item: Json) -> bool:
        service = objects.service(item)
        if service is None:
            return False
        self._table.put_service(service)
        return True

    def remove(self, name: Name) -> None:
        self._table.remove_service(name)


class Slices(Kind):
    """EndpointSlices of Services that are not headless."""

    path = "/apis/discovery.k8s.io/v1/endpointslices"

    def selectors(self, node: str) -> dict[str, str]:
        return {"labelSelector": f"!{objects.HEADLESS}"}

    def put(self, item: Json) -> bool:
        found = objects.endpoint_slice(item)
        if found is None:
            return False
        self._table.put_slice(found)
        return True

    def remove(self, name: Name) -> None:
        self._table.remove_slice(name)


class OwnNodes(Kind):
    """This daemon's Node. Once it is gone, its last zone goes on to count."""

    path = "/api/v1/nodes"

    def selectors(self, node: str) -> dict[str, str]:
        return {"fieldSelector": f"metadata.name={node}"}

    def put(self, item: Json) -> bool:
        self._table.move(objects.own_node(item))
        return True

    def remove(self, name: Name) -> None:
        pass
