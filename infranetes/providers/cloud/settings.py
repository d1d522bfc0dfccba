# SPDX-License-Identifier: Apache-2.0
"""Configuration keys that all clouds share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, Literal, TypeAlias, TypeVar

import attrs

from infranetes.providers.cloud.tenants import are_tenants
from infranetes_common import config_outside as outside
from infranetes_common.config import Bytes

T = TypeVar("T")
_Validator: TypeAlias = Callable[[object, "attrs.Attribute[T]", T], None]

ENDPOINT = r"https?://[A-Za-z0-9.-]+(?::[0-9]{1,5})?/?"

_positive = attrs.validators.gt(0.0)
_not_negative = attrs.validators.ge(0.0)


def not_empty(instance: object, attribute: attrs.Attribute[str], value: str) -> None:
    """Refuse an empty value."""
    if not value:
        raise ValueError("it has to be given")


def matching(pattern: str, expected: str) -> _Validator[str]:
    """Return a validator for keys that match `pattern`, or are "". :param expected: what such a value is."""

    def check(instance: object, attribute: attrs.Attribute[str], value: str) -> None:
        if value and not re.fullmatch(pattern, value):
            raise ValueError(f"{expected} is expected")

    return check


def all_of(pattern: str, expected: str) -> _Validator[tuple[str, ...]]:
    """Return a validator for keys whose values all match `pattern`. :param expected: what such values are."""

    def check(instance: object, attribute: attrs.Attribute[tuple[str, ...]], value: tuple[str, ...]) -> None:
        if not all(re.fullmatch(pattern, each) for each in value):
            raise ValueError(f"{expected} are expected")

    return check


def _is_port(instance: object, attribute: attrs.Attribute[int], value: int) -> None:
    if not 0 < value < 65536:
        raise ValueError("a port is expected, 1 to 65535")


@attrs.frozen(kw_only=True)
class CloudSettings:
    """Keys of every cloud's table.

    :cvar TENANT_KEYS: those that a tenant has for itself, besides `tenants.COMMON_KEYS`."""

    TENANT_KEYS: ClassVar[tuple[str, ...]] = ()

    sizes: tuple[str, ...] = ()  # the sizes that pods may get, with * and ?; empty: all that the cloud has
    # What pods may ask for by annotation, with * and ?; empty: nothing. See `allowed`.
    allowed_images: tuple[str, ...] = ()
    allowed_subnets: tuple[str, ...] = ()
    allowed_security_groups: tuple[str, ...] = ()
    allowed_instance_profiles: tuple[str, ...] = ()
    allowed_elastic_addresses: tuple[str, ...] = ()
    allow_public_address: bool = False
    # The tenants by name, each a table with its own values of TENANT_KEYS, and its namespaces.
    tenants: Mapping[str, Mapping[str, object]] = attrs.field(factory=dict, validator=are_tenants)
    allowed_tenants: tuple[str, ...] = ()  # those that pods may name by annotation, with * and ?
    require_tenant: bool = False  # whether pods of no tenant are refused
    # How many sizes are tried if the cloud has no capacity.
    max_sizes: int = attrs.field(default=5, validator=attrs.validators.ge(1))
    guest_memory: Bytes = Bytes(256 << 20)
    min_memory: Bytes = Bytes(1 << 30)  # the least for a VM, whatever its pod asks for
    agent_port: int = attrs.field(default=2475, validator=_is_port)
    # Which of a VM's addresses the node uses to reach its agent.
    agent_address: Literal["private", "public"] = "private"
    threads: int = attrs.field(default=8, validator=attrs.validators.in_(range(1, 65)))
    call_seconds: float = attrs.field(default=30.0, validator=_positive)  # one call
    retry_seconds: float = attrs.field(default=120.0, validator=_positive)  # a call with its retries
    retry_first: float = attrs.field(default=0.5, validator=_positive)
    retry_most: float = attrs.field(default=15.0, validator=_positive)
    # For each kind of call; 0: as many as the cloud serves by default.
    calls_per_second: float = attrs.field(default=0.0, validator=_not_negative)
    # Between polls while a call waits for a VM.
    poll_seconds: float = attrs.field(default=1.5, validator=_positive)
    # Between lists otherwise: agents tell of their VMs' ends.
    watch_seconds: float = attrs.field(default=300.0, validator=_positive)
    # Between two looks, at the most, at a VM without an agent or with a silent one.
    doubt_seconds: float = attrs.field(default=30.0, validator=_positive)
    # How old the cloud's answers may be.
    settle_seconds: float = attrs.field(default=120.0, validator=_not_negative)
    destroy_seconds: float = attrs.field(default=300.0, validator=_positive)
    volume_seconds: float = attrs.field(default=120.0, validator=_positive)  # for one step in a volume's life
    # US dollars that a stopped VM costs in a month, which is its disk's price; 0: not known.
    stopped_price: float = attrs.field(default=0.0, validator=_not_negative)
    # Between sweeps for unused addresses and disks.
    sweep_seconds: float = attrs.field(default=600.0, validator=_positive)

    @property
    def pods_are_public(self) -> bool:
        """Whether pods have their VMs' public addresses."""
        return False

    def look_outside(self, is_set: Callable[[str], bool]) -> Iterable[outside.Finding]:
        """Say that the cloud was not asked: a check of a file makes no calls."""
        yield outside.unseen(
            "the cloud was not asked whether it takes the credentials and has what the keys here name"
        )
