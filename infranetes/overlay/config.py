# SPDX-License-Identifier: Apache-2.0
"""The configuration's table `overlay`."""

from __future__ import annotations

import re
from ipaddress import IPv4Network

import attrs
from attrs.validators import ge, le

from infranetes.firewalls.shares import SHARE
from infranetes.providers.subnet import subnet
from infranetes_common import config_outside as outside
from infranetes_common.errors import InvalidArgument

_DEVICE = re.compile(r"[a-z][a-z0-9]{0,14}")


def _is_subnet(_: object, field: attrs.Attribute[str], value: str) -> None:
    try:
        if value:
            subnet(value)
    except InvalidArgument as error:
        raise ValueError(f"{field.name}: {error}") from None


def _is_device(_: object, field: attrs.Attribute[str], value: str) -> None:
    if not _DEVICE.fullmatch(value):
        raise ValueError(f"{field.name}: {value!r} is no name for a device: 1 to 15 of a-z and 0-9")


def _is_mtu(_: object, field: attrs.Attribute[int], value: int) -> None:
    if value and not 700 <= value <= 65535:
        raise ValueError(f"{field.name}: {value} is neither 0 nor 700 to 65535")


@attrs.frozen
class OverlayConfig:
    """How VMs that are elsewhere have addresses of the node's own pods."""

    # The pods' subnet. Empty: that of UpdateRuntimeConfig.
    pod_cidr: str = attrs.field(default="", validator=_is_subnet)
    device: str = attrs.field(  # the node's end of the tunnels
        default="infvx0", validator=_is_device, metadata=outside.names(outside.network_device("vxlan"))
    )
    port: int = attrs.field(default=2476, validator=[ge(1), le(65535)])  # UDP, on both sides
    mtu: int = attrs.field(default=0, validator=_is_mtu)  # of the path to the VMs; 0: of both ends' cards
    # How many connections one pod may have begun at a time, of all that the node's kernel can follow.
    connections: int = attrs.field(default=SHARE, validator=ge(64))

    @property
    def network(self) -> IPv4Network | None:
        """The subnet that is configured."""
        return subnet(self.pod_cidr) if self.pod_cidr else None
