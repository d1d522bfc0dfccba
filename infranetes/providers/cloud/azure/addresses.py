# SPDX-License-Identifier: Apache-2.0
"""VMs' addresses: they are their network interfaces', which have their names."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from infranetes.providers.cloud.azure.driver import Driver
from infranetes.providers.cloud.azure.resources import IpConfigurationProperties, Nic


@attrs.frozen
class VmAddresses:
    """A VM's addresses. :ivar public: "" if it has none."""

    private: str = ""
    public: str = ""


class Addresses:
    """The addresses of VMs, which keep them: they are looked up once. Used in threads."""

    def __init__(self) -> None:
        self._known: dict[str, VmAddresses] = {}  # by the VM's name

    def of(self, vm: str) -> VmAddresses:
        """Return what is known of a VM's addresses."""
        return self._known.get(vm, VmAddresses())

    def _thd_learn(self, driver: Driver, vms: Iterable[str]) -> None:
        """Look up the addresses of VMs, if some are not known yet."""
        if all(name in self._known for name in vms):
            return
        configurations = {nic["name"]: _first(nic) for nic in driver.nics()}
        public: dict[str, str] = {}
        if any(each.get("publicIPAddress") for each in configurations.values()):
            public = {
                each["id"].lower(): each["properties"].get("ipAddress") or ""
                for each in driver.public_addresses()
            }
        found = {}
        for name, each in configurations.items():
            reference = (each.get("publicIPAddress") or {}).get("id") or ""
            theirs = public.get(reference.lower(), "")
            if each.get("privateIPAddress") and (theirs or not reference):
                found[name] = VmAddresses(each["privateIPAddress"], theirs)
        self._known = found


def _first(nic: Nic) -> IpConfigurationProperties:
    configurations = nic["properties"].get("ipConfigurations") or ()
    return configurations[0].get("properties") or {} if configurations else {}
