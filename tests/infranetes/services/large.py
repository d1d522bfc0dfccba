# SPDX-License-Identifier: Apache-2.0
"""A table of many Services."""

from __future__ import annotations

from ipaddress import IPv4Address

from infranetes.kubernetes.fields import Name
from infranetes.services.objects import Endpoint, EndpointPort, EndpointSlice, OwnNode, Service, ServicePort
from infranetes.services.table import RuleTable


def large_table(services: int, endpoints: int = 5) -> RuleTable:
    """Return a table of so many Services, with so many endpoints each."""
    table = RuleTable(OwnNode("here"))
    for number in range(services):
        put_service(table, number, endpoints)
    return table


def put_service(table: RuleTable, number: int, endpoints: int = 5, shift: int = 0) -> None:
    """Put a Service into the table. :param shift: a different number gives it different endpoints."""
    name = Name("ns", f"s{number}")
    first = IPv4Address("10.2.0.0") + number * 16 + shift
    its = tuple(Endpoint(first + each) for each in range(endpoints))
    ports = (EndpointPort("", "TCP", 8080),)
    address = IPv4Address("10.96.0.1") + number
    table.put_service(Service(name, (address,), (ServicePort("", "TCP", 80),)))
    table.put_slice(EndpointSlice(Name("ns", f"s{number}-1"), name, ports, its))
