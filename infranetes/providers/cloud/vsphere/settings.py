# SPDX-License-Identifier: Apache-2.0
"""Configuration keys of vSphere."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, IPv4Network, ip_network
from pathlib import Path
from typing import ClassVar

import attrs

from infranetes.providers.cloud.settings import CloudSettings
from infranetes.providers.cloud.vsphere.addresses import AddressPool, parse_range
from infranetes_common import config_outside as outside

MOST_SNAPSHOTS = 32  # the most that vSphere keeps of one disk

_MOST_ADDRESSES = 1 << 16
_PATH = re.compile(r"[^/\x00-\x1f]{1,240}(?:/[^/\x00-\x1f]{1,240}){0,20}")


def _is_host(instance: object, attribute: attrs.Attribute[str], value: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252}[A-Za-z0-9])?(?::[0-9]{1,5})?", value):
        raise ValueError("HOST or HOST:PORT is expected; it is always asked over https")


def _is_given(instance: object, attribute: attrs.Attribute[str], value: str) -> None:
    if not value.strip():
        raise ValueError("it is empty")


def _check_path(value: str) -> None:
    if not _PATH.fullmatch(value):
        raise ValueError("a path in the inventory is expected, such as NAME or FOLDER/NAME")


def _is_path(instance: object, attribute: attrs.Attribute[str], value: str) -> None:
    _check_path(value)


def _is_path_or_empty(instance: object, attribute: attrs.Attribute[str], value: str) -> None:
    if value:
        _check_path(value)


def _are_paths(instance: object, attribute: attrs.Attribute[tuple[str, ...]], value: Sequence[str]) -> None:
    if not value:
        raise ValueError("at least one is expected")
    for each in value:
        _check_path(each)


def _is_network(instance: object, attribute: attrs.Attribute[str], value: str) -> None:
    if value:
        ip_network(value)


def _are_ranges(
    instance: Settings, attribute: attrs.Attribute[tuple[str, ...]], value: Sequence[str]
) -> None:
    if not value:
        return
    pool = instance.address_pool()
    assert pool is not None
    if pool.gateway not in pool.network:
        raise ValueError(f"gateway has to be in addresses, {pool.network}")
    if any(each.first not in pool.network or each.last not in pool.network for each in pool.ranges):
        raise ValueError(f"they have to be in addresses, {pool.network}")
    if sum(int(each.last) - int(each.first) + 1 for each in pool.ranges) > _MOST_ADDRESSES:
        raise ValueError(f"they have more than {_MOST_ADDRESSES} addresses")
    if not pool.usable():
        raise ValueError("they have no address that a VM may have")


def _has_image_folder(instance: Settings, attribute: attrs.Attribute[str], value: str) -> None:
    if value and not instance.image_folder:
        raise ValueError("it needs image_folder, where its items are deployed")


def _password(path: Path) -> Iterator[outside.Finding]:
    from infranetes.providers.cloud.vsphere.session import _thd_password  # late: with it come its libraries

    return outside.tried(lambda: _thd_password(path), "password_file")


@attrs.frozen(kw_only=True)
class Settings(CloudSettings):
    """The table `providers.vsphere`. Paths are below the datacenter's folders, as govc shows them."""

    TENANT_KEYS: ClassVar[tuple[str, ...]] = (
        "username",
        "password_file",
        "folder",
        "image",
        "image_folder",
        "content_library",
        "resource_pools",
        "networks",
        "datastore",
        "volumes_datastore",
        "consoles_datastore",
        "addresses",
        "gateway",
        "address_ranges",
    )

    host: str = attrs.field(validator=_is_host)  # the vCenter
    username: str = attrs.field(validator=_is_given)
    # Its first line is the password; only its owner may read it.
    password_file: Path = attrs.field(metadata=outside.names(lambda path: _password(path)))
    # The trusted CAs; none: the system's.
    ca_file: Path | None = attrs.field(default=None, metadata=outside.names(outside.file))
    datacenter: str = attrs.field(validator=_is_path)
    folder: str = attrs.field(validator=_is_path)  # the folder of pods' VMs, below vm/
    image: str = attrs.field(validator=_is_path)  # the template of a guest with our agent, below vm/
    # The folder of templates that pods may name, below vm/.
    image_folder: str = attrs.field(default="", validator=_is_path_or_empty)
    # The library whose items pods may name.
    content_library: str = attrs.field(default="", validator=_has_image_folder)
    resource_pools: tuple[str, ...] = attrs.field(validator=_are_paths)  # tried in this order, below host/
    # Below network/. Pods get the first one, and may ask for the others.
    networks: tuple[str, ...] = attrs.field(validator=_are_paths)
    allowed_subnets: tuple[str, ...] = ("*",)  # those of `networks` that pods may ask for
    datastore: str = attrs.field(default="", validator=_is_path_or_empty)  # empty: the template's
    # The datastore of volumes, below datastore/; empty: there are no volumes.
    volumes_datastore: str = attrs.field(default="", validator=_is_path_or_empty)
    # The datastore of the files that guests without our agent write their consoles to, likewise; empty: no
    # console is kept.
    consoles_datastore: str = attrs.field(default="", validator=_is_path_or_empty)
    # How many snapshots one volume may have; each of them slows it down.
    snapshots_per_volume: int = attrs.field(
        default=3, validator=[attrs.validators.ge(1), attrs.validators.le(MOST_SNAPSHOTS)]
    )
    # The network that pods' addresses are from; empty: any.
    addresses: str = attrs.field(default="", validator=_is_network)
    gateway: str = ""  # that network's gateway, for VMs with an address of address_ranges
    # Addresses of that network that this node, and no other, gives to VMs on the first of `networks`; empty:
    # DHCP gives them.
    address_ranges: tuple[str, ...] = attrs.field(default=(), validator=_are_ranges)
    # Polling may be frequent: a list is one request, and vCenter documents no limit of requests.
    poll_seconds: float = attrs.field(default=1.0, validator=attrs.validators.gt(0.0))
    # A larger size is no more likely to be available, so other resource pools are tried instead.
    max_sizes: int = attrs.field(default=1, validator=attrs.validators.ge(1))

    def __attrs_post_init__(self) -> None:
        for name, its in self.tenants.items():
            if self.address_ranges and "address_ranges" not in its:
                raise ValueError(
                    f"tenants.{name}: it needs address_ranges of its own, since the provider's are given to "
                    "VMs of no tenant; [] means DHCP"
                )

    def address_pool(self) -> AddressPool | None:
        """What this node gives addresses from; None: DHCP gives them.

        :raise ValueError: it is malformed."""
        if not self.address_ranges:
            return None
        try:
            network, gateway = IPv4Network(self.addresses), IPv4Address(self.gateway)
        except ValueError:
            raise ValueError(
                "with them, addresses has to be an IPv4 network and gateway its router"
            ) from None
        return AddressPool(network, gateway, tuple(parse_range(each) for each in self.address_ranges))
