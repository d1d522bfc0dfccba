# SPDX-License-Identifier: Apache-2.0
"""Floating addresses, which outlive a server.

Neutron can tag a resource only once it exists, so for a moment it would be unknown whose an address is. The
description is set from the beginning, and lists can be filtered by it, so it says whose an address is.
"""

from __future__ import annotations

from libcloud.common.exceptions import BaseHTTPError

from infranetes.providers.annotations import PREFIX
from infranetes.providers.cloud.interface import (
    CLUSTER,
    NODE,
    TOKEN,
    CloudError,
    CloudVM,
    ErrorKind,
    Leftover,
)
from infranetes.providers.cloud.openstack.driver import Driver
from infranetes.providers.cloud.openstack.names import tag


class FloatingAddresses:
    """The floating addresses of a node's VMs."""

    def __init__(self, cluster: str, node: str) -> None:
        self._ours = f"{tag(CLUSTER, cluster)} {tag(NODE, node)} "
        self.network = ""  # the id of the network from which new addresses are allocated

    def _description(self, token: str) -> str:
        return self._ours + tag(TOKEN, token)

    def _thd_associate(self, driver: Driver, vm: CloudVM) -> None:
        """Give a server its wanted address. Idempotent."""
        port = driver.port_of(vm.id)
        if not port:
            raise CloudError(ErrorKind.TRANSIENT, f"VM {vm.id} has no port yet")
        if vm.wanted_address != "new":
            _thd_give(driver, vm.wanted_address, port)
            return
        allocated = driver.floating_addresses(description=self._description(vm.token))
        if not allocated:
            description = self._description(vm.token)
            wanted = {"floating_network_id": self.network, "port_id": port, "description": description}
            driver.create_floating_address(wanted)
        elif allocated[0].get("port_id") != port:
            driver.give_floating_address(allocated[0]["id"], port)

    def _thd_release_of(self, driver: Driver, token: str) -> None:
        """Release the addresses that were allocated for a token's server. Idempotent."""
        for address in driver.floating_addresses(description=self._description(token)):
            driver.delete_floating_address(address["id"])

    def _thd_leftovers(self, driver: Driver) -> list[Leftover]:
        """Return addresses of ours that no server has."""
        return [
            Leftover(each["id"], "address", each["description"].rpartition("=")[2])
            for each in driver.floating_addresses()
            if each.get("description", "").startswith(self._ours) and not each.get("port_id")
        ]


def _thd_give(driver: Driver, id: str, port: str) -> None:
    """Give an address of the project's own to a server. :raise CloudError: there is none with this id."""
    try:
        driver.give_floating_address(id, port)
    except BaseHTTPError as error:
        if int(error.code) != 404:
            raise
        words = f"annotation {PREFIX}elastic-address: the project has no floating address {id}"
        raise CloudError(ErrorKind.INVALID, words) from error
