# SPDX-License-Identifier: Apache-2.0
"""The kinds of objects that are followed, and how they enter the table."""

from __future__ import annotations

from collections.abc import Iterable

from infranetes.kubernetes import fields
from infranetes.kubernetes.fields import Name
from infranetes.kubernetes.kinds import Kind
from infranetes.kubernetes.watch import Json
from infranetes.services import objects
from infranetes.services.table import RuleTable


class Services(Kind):
    """Services that have addresses and are not served by another proxy."""

    path = "/api/v1/services"

    def __init__(self, table: RuleTable) -> None:
        super().__init__({"labelSelector": f"!{objects.PROXY_NAME}", "fieldSelector": "spec.clusterIP!=None"})
        self._table = table

    def trimmed(self, item: Json) -> Json:
        return objects.trimmed(item)

    def put(self, item: Json) -> Iterable[None] | None:
        service = objects.service(item)
        if service is None:
            return None
        self._table.put_service(service)
        return ()

    def remove(self, name: Name) -> Iterable[None]:
        self._table.remove_service(name)
        return ()


class Slices(Kind):
    """EndpointSlices, except those of headless Services."""

    path = "/apis/discovery.k8s.io/v1/endpointslices"

    def __init__(self, table: RuleTable) -> None:
        super().__init__({"labelSelector": f"!{objects.HEADLESS}"})
        self._table = table

    def trimmed(self, item: Json) -> Json:
        return objects.trimmed(item)

    def put(self, item: Json) -> Iterable[None] | None:
        found = objects.endpoint_slice(item)
        if found is None:
            return None
        self._table.put_slice(found)
        return ()

    def remove(self, name: Name) -> Iterable[None]:
        self._table.remove_slice(name)
        return ()


class ServiceRanges(Kind):
    """ServiceCIDRs: the ranges from which cluster IPs are taken."""

    path = "/apis/networking.k8s.io/v1/servicecidrs"
    optional = True

    def __init__(self, table: RuleTable) -> None:
        super().__init__()
        self._table = table

    def put(self, item: Json) -> Iterable[None] | None:
        self._table.put_ranges(fields.name(item), objects.service_ranges(item))
        return ()

    def remove(self, name: Name) -> Iterable[None]:
        self._table.put_ranges(name, ())
        return ()


class OwnNodes(Kind):
    """This daemon's Node. If it is deleted, its last zone still counts."""

    path = "/api/v1/nodes"

    def __init__(self, table: RuleTable, node: str) -> None:
        super().__init__({"fieldSelector": f"metadata.name={node}"})
        self._table = table

    def put(self, item: Json) -> Iterable[None] | None:
        return self._table.move(objects.own_node(item))

    def remove(self, name: Name) -> Iterable[None]:
        return ()
