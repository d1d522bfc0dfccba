# SPDX-License-Identifier: Apache-2.0
"""VMs' addresses: they are their network interfaces', which have their names."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from infranetes.providers.cloud.azure.driver import Driver
from infranetes.providers.cloud.azure.names import last
from infranetes.providers.cloud.azure.resources import IpConfigurationProperties, Nic


@attrs.frozen
class VmAddresses:
    """A VM's addresses. :ivar public: "" if it has none."""

    private: str = ""
    public: str = ""


_FEW = 3  # VMs, of which each interface is looked up by itself: the group may hold those of many nodes


class Addresses:
    """The addresses of VMs, which keep them: they are looked up once. Used in threads."""

    def __init__(self) -> None:
        self._known: dict[str, VmAddresses] = {}  # by the VM's name

    def of(self, vm: str) -> VmAddresses:
        """Return what is known of a VM's addresses."""
        return self._known.get(vm, VmAddresses())

    def _thd_learn(self, driver: Driver, vms: Iterable[str]) -> None:
        """Look up the addresses of VMs, if some are not known yet."""
        wanted = list(vms)
        unknown = [name for name in wanted if name not in self._known]
        if not unknown:
            return
        if len(unknown) <= _FEW:
            found = {name: one for name in unknown if (one := self._thd_look_up(driver, name)) is not None}
            self._known = {**self._known, **found}
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

    def forget_others(self, vms: Iterable[str]) -> None:
        """Forget the addresses of all other VMs."""
        self._known = {name: self._known[name] for name in vms if name in self._known}

    def _thd_look_up(self, driver: Driver, vm: str) -> VmAddresses | None:
        """Return a VM's addresses; None: it does not have all of them yet."""
        nic = driver.nic(vm)
        each = _first(nic) if nic is not None else {}
        private = each.get("privateIPAddress") or ""
        reference = (each.get("publicIPAddress") or {}).get("id") or ""
        address = driver.public_address(last(reference)) if reference else None
        public = (address["properties"].get("ipAddress") or "") if address is not None else ""
        return VmAddresses(private, public) if private and (public or not reference) else None


def _first(nic: Nic) -> IpConfigurationProperties:
    configurations = nic["properties"].get("ipConfigurations") or ()
    return configurations[0].get("properties") or {} if configurations else {}
