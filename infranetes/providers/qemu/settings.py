"""What the configuration may say of the QEMU provider."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import attrs

from infranetes.guest.image import DEFAULT_DIR
from infranetes.providers.qemu.subnet import subnet
from infranetes_common.config import Bytes
from infranetes_common.errors import InvalidArgument

MIB = 1 << 20
_BRIDGE = re.compile(r"[a-z][a-z0-9]{0,14}")
ACCELERATORS = ("auto", "kvm", "tcg")


def _is_subnet(_: object, field: attrs.Attribute[str], value: str) -> None:
    try:
        subnet(value)
    except InvalidArgument as error:
        raise ValueError(f"{field.name}: {error}") from None


def _is_bridge(_: object, field: attrs.Attribute[str], value: str) -> None:
    if not _BRIDGE.fullmatch(value):
        raise ValueError(f"{field.name}: {value!r} is no name for a bridge: 1 to 15 of a-z and 0-9")


def _is_mtu(_: object, field: attrs.Attribute[int], value: int) -> None:
    if value and not 576 <= value <= 65535:
        raise ValueError(f"{field.name}: {value} is neither 0 nor 576 to 65535")


def _at_least(least: float) -> Any:
    return attrs.validators.ge(least)


def _host_memory() -> Bytes:
    return Bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


@attrs.frozen
class QemuSettings:
    """The table `providers.qemu`. Times in seconds."""

    pod_cidr: str = attrs.field(default="10.88.0.0/16", validator=_is_subnet)
    """The pods' subnet, until UpdateRuntimeConfig brings another. Its first address is the node's."""
    bridge: str = attrs.field(default="infranetes0", validator=_is_bridge)
    mtu: int = attrs.field(default=0, validator=_is_mtu)
    """Of the pods' network; 0: that of the interface with the node's default route."""

    image_dir: Path = DEFAULT_DIR
    """Where guest images are; `infranetes-guest build` makes them."""
    template_dir: Path | None = None
    """Where the template is kept; not given: in the daemon's state directory."""

    qemu: str = "qemu-system-x86_64"
    qemu_img: str = "qemu-img"
    user: str = "infranetes-qemu"
    """Whom QEMU runs as; it needs no rights at all."""
    accelerator: str = attrs.field(default="auto", validator=attrs.validators.in_(ACCELERATORS))
    """auto: KVM if a small guest proves that it works, else emulation (tcg)."""

    cpu: str = attrs.field(default="", validator=attrs.validators.matches_re(r"[A-Za-z0-9_.,=+-]*"))
    """QEMU's processor model, with features; empty: the node's own under KVM, under emulation all that can
    be emulated but AVX, which takes twice the time of what programs use in its place."""

    memory: Bytes = attrs.field(default=Bytes(1 << 30), validator=_at_least(256 * MIB))
    """Of a VM whose pod asks for no more. What a VM does not touch takes no memory of the node."""
    guest_memory: Bytes = Bytes(256 * MIB)
    """The guest's own need, on top of what the pod asks for."""
    max_memory: Bytes = attrs.field(factory=_host_memory, validator=_at_least(256 * MIB))
    """Of the largest VM; the node's own when not given."""
    max_cpus: int = attrs.field(factory=lambda: os.cpu_count() or 1, validator=_at_least(1))
    """A pod that asks for more gets this many: more than the node has would make it slower."""

    template_timeout: float = attrs.field(default=600.0, validator=_at_least(1))
    """For the one boot of the template."""
    launch_timeout: float = attrs.field(default=60.0, validator=_at_least(0.1))
    """From the start of a VM's process until it executes."""
    boot_timeout: float = attrs.field(default=120.0, validator=_at_least(0.1))
    """From then on until its agent has taken on its identity; a VM that needs longer is ended."""
    console_size: Bytes = attrs.field(default=Bytes(MIB), validator=_at_least(16384))
    """Kept of a VM's console, at least the last half of it."""
