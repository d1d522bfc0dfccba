"""What the configuration may say of the simulated provider."""

from __future__ import annotations

import sys
from ipaddress import IPv4Network
from typing import Any

import attrs

from infranetes.providers.simulated.addresses import subnet
from infranetes_common.config import Bytes
from infranetes_common.errors import InvalidArgument

BEHAVIOURS = ("normal", "never", "no-agent", "unreachable", "dies-after")
FAILS = "fails"

BEHAVIOUR_ANNOTATION = "simulated.infranetes.io/behaviour"
AFTER_ANNOTATION = "simulated.infranetes.io/after"


@attrs.frozen
class Fault:
    """What goes wrong with every nth launch of a daemon's life."""

    every: int = attrs.field(validator=attrs.validators.ge(1))
    behaviour: str = attrs.field(validator=attrs.validators.in_((FAILS, *BEHAVIOURS)))
    after: float = attrs.field(default=0.0, validator=attrs.validators.ge(0))  # seconds, for dies-after


def _has_room(instance: Any, attribute: Any, network: IPv4Network) -> None:
    try:
        subnet(str(network))
    except InvalidArgument as error:
        raise ValueError(str(error)) from None


@attrs.frozen
class Settings:
    """The table `providers.simulated`."""

    boot_seconds: float = attrs.field(default=0.5, validator=attrs.validators.ge(0))
    jitter_seconds: float = attrs.field(default=0.25, validator=attrs.validators.ge(0))
    pod_cidr: IPv4Network = attrs.field(  # until UpdateRuntimeConfig brings another
        default=IPv4Network("10.89.0.0/16"), validator=_has_room
    )
    capacity: int = attrs.field(default=0, validator=attrs.validators.ge(0))  # VMs at once; 0: no limit
    max_cpu_millis: int = attrs.field(default=64_000, validator=attrs.validators.ge(1))
    max_memory: Bytes = Bytes(1 << 40)
    faults: tuple[Fault, ...] = ()
    farm_command: tuple[str, ...] = (sys.executable, "-m", "vmserver.farm")
