"""What the configuration may say of every cloud."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from infranetes_common.config import Bytes

_positive: Any = attrs.validators.gt(0)
_not_negative: Any = attrs.validators.ge(0)


def _is_port(instance: Any, attribute: Any, value: int) -> None:
    if not 0 < value < 65536:
        raise ValueError("a port is expected, 1 to 65535")


@attrs.frozen(kw_only=True)
class CloudSettings:
    """Keys of each cloud's table."""

    sizes: tuple[str, ...] = ()  # names that pods may have, with * and ?; empty: all of the cloud's
    max_sizes: int = attrs.field(default=5, validator=attrs.validators.ge(1))  # tried without capacity
    guest_memory: Bytes = Bytes(256 << 20)
    agent_port: int = attrs.field(default=2475, validator=_is_port)
    agent_address: Literal["private", "public"] = "private"  # by which the node reaches agents
    threads: int = attrs.field(default=8, validator=attrs.validators.in_(range(1, 65)))
    call_seconds: float = attrs.field(default=30.0, validator=_positive)  # one call
    retry_seconds: float = attrs.field(default=120.0, validator=_positive)  # a call with its retries
    retry_first: float = attrs.field(default=0.5, validator=_positive)
    retry_most: float = attrs.field(default=15.0, validator=_positive)
    calls_per_second: float = attrs.field(default=10.0, validator=_positive)
    poll_seconds: float = attrs.field(default=2.0, validator=_positive)  # while a VM is waited for
    watch_seconds: float = attrs.field(default=15.0, validator=_positive)  # otherwise
    settle_seconds: float = attrs.field(default=120.0, validator=_not_negative)  # answers may be so old
    destroy_seconds: float = attrs.field(default=300.0, validator=_positive)
    sweep_seconds: float = attrs.field(default=600.0, validator=_positive)  # addresses and disks
