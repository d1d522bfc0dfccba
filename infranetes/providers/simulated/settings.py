"""What the configuration may say of the simulated provider."""

from __future__ import annotations

import sys

import attrs

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


@attrs.frozen
class Settings:
    """The table `provider.simulated`."""

    boot_seconds: float = attrs.field(default=0.5, validator=attrs.validators.ge(0))
    jitter_seconds: float = attrs.field(default=0.25, validator=attrs.validators.ge(0))
    pod_cidr: str = "10.89.0.0/16"  # until UpdateRuntimeConfig brings another
    capacity: int = attrs.field(default=0, validator=attrs.validators.ge(0))  # VMs at once; 0: no limit
    max_cpu_millis: int = attrs.field(default=64_000, validator=attrs.validators.ge(1))
    max_memory_bytes: int = attrs.field(default=1 << 40, validator=attrs.validators.ge(1))
    faults: tuple[Fault, ...] = ()
    farm_command: tuple[str, ...] = (sys.executable, "-m", "vmserver.farm")
