# SPDX-License-Identifier: Apache-2.0
"""The simulated provider's table of the configuration, and its annotations."""

from __future__ import annotations

import sys
from ipaddress import IPv4Network

import attrs

from infranetes_common import config_outside as outside
from infranetes_common.config import Bytes
from infranetes_common.errors import InvalidArgument
from infranetes_simulation.protocol import ARCHIVES, BEHAVIOURS, LAYERS
from infranetes_simulation.provider.addresses import subnet

FAILS = "fails"  # a launch that fails; the other faults are behaviours of VMs

SHARED, NAMESPACES = "shared", "namespaces"  # what VMs run on: all on this machine, or each on its own

PREFIX = "simulated.infranetes.io/"
BEHAVIOUR_ANNOTATION = PREFIX + "behaviour"
AFTER_ANNOTATION = PREFIX + "after"
IMAGES_ANNOTATION = PREFIX + "images"
ANNOTATIONS = (BEHAVIOUR_ANNOTATION, AFTER_ANNOTATION, IMAGES_ANNOTATION)


@attrs.frozen
class Fault:
    """What goes wrong with every nth launch of a daemon."""

    every: int = attrs.field(validator=attrs.validators.ge(1))
    behaviour: str = attrs.field(validator=attrs.validators.in_((FAILS, *BEHAVIOURS)))
    after: float = attrs.field(default=0.0, validator=attrs.validators.ge(0))  # seconds, for dies-after


def _has_room(instance: object, attribute: object, network: IPv4Network) -> None:
    try:
        subnet(str(network))
    except InvalidArgument as error:
        raise ValueError(str(error)) from None


@attrs.frozen
class Settings:
    """The table `providers.simulated`."""

    boot_seconds: float = attrs.field(default=0.5, validator=attrs.validators.ge(0))
    jitter_seconds: float = attrs.field(default=0.25, validator=attrs.validators.ge(0))
    start_seconds: float = attrs.field(default=0.1, validator=attrs.validators.ge(0))  # of a stopped VM
    stop_seconds: float = attrs.field(default=0.1, validator=attrs.validators.ge(0))
    starts_fail: bool = False  # whether no stopped VM can be started
    pod_cidr: IPv4Network = attrs.field(  # until UpdateRuntimeConfig brings another
        default=IPv4Network("10.89.0.0/16"), validator=_has_room
    )
    machines: str = attrs.field(default=SHARED, validator=attrs.validators.in_((SHARED, NAMESPACES)))
    cgroup: str = attrs.field(  # the cgroup that those of VMs in namespaces are below
        default="infranetes-simulated", validator=attrs.validators.matches_re(r"[a-z0-9-]+(?:/[a-z0-9-]+)*")
    )
    keep_layers: bool = False  # whether VMs in namespaces begin with the layers that earlier ones had
    images: str = attrs.field(default=ARCHIVES, validator=attrs.validators.in_((ARCHIVES, LAYERS)))
    capacity: int = attrs.field(default=0, validator=attrs.validators.ge(0))  # VMs at once; 0: no limit
    max_cpu_millis: int = attrs.field(default=64_000, validator=attrs.validators.ge(1))
    max_memory: Bytes = Bytes(1 << 40)
    faults: tuple[Fault, ...] = ()
    farm_command: tuple[str, ...] = attrs.field(
        default=(sys.executable, "-m", "infranetes_simulation.farm"),
        metadata=outside.names(lambda command: outside.program(command[0])),
    )
