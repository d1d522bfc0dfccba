# SPDX-License-Identifier: Apache-2.0
"""Configuration keys of vSphere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, ip_network
from pathlib import Path

import attrs

from infranetes.providers.cloud.settings import CloudSettings
from infranetes.providers.cloud.vsphere.addresses import Pool, parse_range

MOST_SNAPSHOTS = 32  # that vSphere keeps of one disk

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


@attrs.frozen(kw_only=True)
class Settings(CloudSettings):
    """The table `providers.vsphere`. Paths are below the datacenter's folders, as govc shows them."""

    host: str = attrs.field(validator=_is_host)  # the vCenter
    username: str = attrs.field(validator=_is_given)
    password_file: Path  # its first line; nobody but its owner may read it
    ca_file: Path | None = None  # of trusted CAs; none: the system's
    datacenter: str = attrs.field(validator=_is_path)
    folder: str = attrs.field(validator=_is_path)  # of pods' VMs, below vm/
    image: str = attrs.field(validator=_is_path)  # the template of a guest with our agent, below vm/
    # Of templates that pods may name, below vm/.
    image_folder: str = attrs.field(default="", validator=_is_path_or_empty)
    content_library: str = attrs.field(default="", validator=_has_image_folder)  # whose items pods may name
    resource_pools: tuple[str, ...] = attrs.field(validator=_are_paths)  # tried in this order, below host/
    # below network/: the first one is what pods get, the others they may ask for
    networks: tuple[str, ...] = attrs.field(validator=_are_paths)
    allowed_subnets: tuple[str, ...] = ("*",)  # of networks
    datastore: str = attrs.field(default="", validator=_is_path_or_empty)  # empty: where the template is
    # Of volumes, below datastore/; empty: there are none.
    volumes_datastore: str = attrs.field(default="", validator=_is_path_or_empty)
    # Snapshots of one volume, each of which slows it down.
    snapshots_per_volume: int = attrs.field(
        default=3, validator=[attrs.validators.ge(1), attrs.validators.le(MOST_SNAPSHOTS)]
    )
    # The network of pods' addresses; empty: any.
    addresses: str = attrs.field(default="", validator=_is_network)
    gateway: str = ""  # of that network, for VMs that have an address of address_ranges
    # Addresses of it that this node, and no other, gives to VMs on the first network; empty: DHCP does.
    address_ranges: tuple[str, ...] = attrs.field(default=(), validator=_are_ranges)
    # A list is one request, of a vCenter that documents no limit of them.
    poll_seconds: float = attrs.field(default=1.0, validator=attrs.validators.gt(0.0))
    # A larger size is not more likely to be available: other resource pools are tried instead.
    max_sizes: int = attrs.field(default=1, validator=attrs.validators.ge(1))

    def address_pool(self) -> Pool | None:
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
        return Pool(network, gateway, tuple(parse_range(each) for each in self.address_ranges))
