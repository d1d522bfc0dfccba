# SPDX-License-Identifier: Apache-2.0
"""The configuration's table `providers.qemu`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import attrs

from infranetes.firewalls.shares import SHARE
from infranetes.guest.image import DEFAULT_DIR, NoGuestImage, current
from infranetes.providers.qemu.host import uids
from infranetes.providers.qemu.host.kvm import look_at_kvm, qemu_user
from infranetes.providers.subnet import subnet
from infranetes_common import config_outside as outside
from infranetes_common.config import Bytes
from infranetes_common.errors import InfranetesError, InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_T = TypeVar("_T")
MIB = 1 << 20
BLOCK_MIB = 128  # the unit in which x86 guests take hotplugged memory
_BRIDGE = re.compile(r"[a-z][a-z0-9]{0,14}")
ACCELERATORS = ("auto", "kvm", "tcg")


def round_up_to_block(mebibytes: int) -> int:
    """The next multiple of `BLOCK_MIB`."""
    return -(-mebibytes // BLOCK_MIB) * BLOCK_MIB


def _is_subnet(_: object, field: attrs.Attribute[str], value: str) -> None:
    try:
        subnet(value)
    except InvalidArgument as error:
        raise ValueError(f"{field.name}: {error}") from None


def _is_users(_: object, field: attrs.Attribute[str], value: str) -> None:
    try:
        uids.parse(value)
    except InvalidArgument as error:
        raise ValueError(f"{field.name}: {error}") from None


def _is_bridge(_: object, field: attrs.Attribute[str], value: str) -> None:
    if not _BRIDGE.fullmatch(value):
        raise ValueError(f"{field.name}: {value!r} is no name for a bridge: 1 to 15 of a-z and 0-9")


def _is_mtu(_: object, field: attrs.Attribute[int], value: int) -> None:
    if value and not 576 <= value <= 65535:
        raise ValueError(f"{field.name}: {value} is neither 0 nor 576 to 65535")


def _are_devices(_: object, field: attrs.Attribute[tuple[str, ...]], paths: tuple[str, ...]) -> None:
    for path in paths:
        if not path.startswith("/dev/") or os.path.normpath(path) != path or not path.isprintable():
            raise ValueError(f"{field.name}: {path!r} is no path of a device, such as /dev/sdb")


def _at_least(least: float) -> Callable[[object, attrs.Attribute[_T], _T], object]:
    return cast("Callable[[object, attrs.Attribute[_T], _T], object]", attrs.validators.ge(least))


def _host_memory() -> Bytes:
    return Bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _images(path: Path) -> Iterator[outside.Finding]:
    try:
        current(path)
    except NoGuestImage as error:
        yield outside.warning(f"{error}; the daemon waits for it")
    except (InfranetesError, OSError):
        yield from outside.tried(lambda: current(path))


def _user(name: str) -> Iterator[outside.Finding]:
    return outside.tried(lambda: qemu_user(name))


@attrs.frozen
class QemuSettings:
    """The table `providers.qemu`. Times in seconds."""

    pod_cidr: str = attrs.field(default="10.88.0.0/16", validator=_is_subnet)
    """The pods' subnet, until UpdateRuntimeConfig sets another. Its first address is the node's."""
    bridge: str = attrs.field(
        default="infranetes0", validator=_is_bridge, metadata=outside.names(outside.network_device("bridge"))
    )
    mtu: int = attrs.field(default=0, validator=_is_mtu)
    """MTU of the pods' network; 0: that of the interface with the node's default route."""
    connections: int = attrs.field(default=SHARE, validator=attrs.validators.ge(64))
    """How many connections one pod may have begun at a time, of all that the node's kernel can follow."""

    image_dir: Path = attrs.field(default=DEFAULT_DIR, metadata=outside.names(lambda path: _images(path)))
    """The directory of the guest images, which `infranetes-guest build` makes."""
    template_dir: Path | None = attrs.field(default=None, metadata=outside.names(outside.directory))
    """Where templates are kept; by default in the daemon's state directory."""
    volumes_dir: Path | None = attrs.field(default=None, metadata=outside.names(outside.directory))
    """Where volumes are kept, which outlive their pods; by default in the daemon's state directory."""

    devices: tuple[str, ...] = attrs.field(
        default=(), validator=_are_devices, metadata=outside.names(outside.for_each(outside.block_device))
    )
    """Block devices of the node that pods may have, each one pod's at a time; by default none."""

    qemu: str = attrs.field(default="qemu-system-x86_64", metadata=outside.names(outside.program))
    qemu_img: str = attrs.field(default="qemu-img", metadata=outside.names(outside.program))
    user: str = attrs.field(default="infranetes-qemu", metadata=outside.names(lambda name: _user(name)))
    """The user that QEMU runs as while a template is made, or its number; it needs no rights."""
    uids: str = attrs.field(default="1900000000-1900009999", validator=_is_users)
    """Uids for VMs, and gids of the same numbers: each VM runs as one that nothing else on the node has."""
    accelerator: str = attrs.field(default="auto", validator=attrs.validators.in_(ACCELERATORS))
    """auto: KVM if a small guest proves that it works, else emulation (tcg)."""

    cpu: str = attrs.field(
        default="",
        validator=attrs.validators.matches_re(r"[A-Za-z0-9_.,=+-]*"),
        metadata=outside.names(outside.never("QEMU was not asked whether it has this model")),
    )
    """QEMU's processor model, with features; empty: under KVM the node's own; under emulation all features
    but AVX, ERMS, FSRM and LA57, which make it slow or keep it from booting: see `program.command_line`."""

    memory: Bytes = attrs.field(default=Bytes(1 << 30), validator=_at_least(256 * MIB))
    """Memory of a VM whose pod asks for no more. Pages that a VM never touches take no memory of the node."""
    guest_memory: Bytes = Bytes(256 * MIB)
    """The guest system's own need, added to what the pod asks for."""
    host_memory: Bytes = Bytes(64 * MIB)
    """What QEMU takes of the node beside the VM's memory and its `code_cache`."""
    max_memory: Bytes = attrs.field(factory=_host_memory, validator=_at_least(256 * MIB))
    """Memory of the largest VM; by default the node's own."""
    max_cpus: int = attrs.field(factory=lambda: os.cpu_count() or 1, validator=_at_least(1))
    """Processors of the largest VM; a pod that asks for more gets this many. By default the node's own."""

    code_cache: Bytes = attrs.field(default=Bytes(96 * MIB), validator=_at_least(8 * MIB))
    """Memory of the node that a VM's translated code may take, under emulation alone. Code that finds no room
    in it is translated anew."""

    starts_at_once: int = attrs.field(
        factory=lambda: len(os.sched_getaffinity(0)), validator=attrs.validators.ge(0)
    )
    """How many pods start at once under emulation; the others wait in line. 0: any number. By default as many
    as the processors that the daemon may use."""

    disk: Bytes = attrs.field(default=Bytes(20 << 30), validator=_at_least(1 << 30))
    """Disk of a VM whose pod asks for no size; at least the guest image's. Unwritten blocks take no room."""
    max_disk: Bytes = attrs.field(default=Bytes(100 << 30), validator=_at_least(1 << 30))
    """The largest disk that a pod may ask for with the annotation `infranetes.io/disk`."""

    template_timeout: float = attrs.field(default=600.0, validator=_at_least(1))
    """For booting the template, which happens once."""
    launch_timeout: float = attrs.field(default=60.0, validator=_at_least(0.1))
    """From the start of a VM's process until the VM executes."""
    boot_timeout: float = attrs.field(default=120.0, validator=_at_least(0.1))
    """From then on until its agent has its identity; a VM that takes longer is ended."""
    resize_timeout: float = attrs.field(default=60.0, validator=_at_least(0.1))
    """For the guest of a VM that runs to take in, or to give back, memory or a processor."""
    console_size: Bytes = attrs.field(default=Bytes(MIB), validator=_at_least(16384))
    """How much of a VM's console is kept: at least the last half of this."""
    kept_consoles: int = attrs.field(default=32, validator=_at_least(0))
    """For how many of the last destroyed VMs the end of the console is kept."""

    def look_outside(self, is_set: Callable[[str], bool]) -> Iterator[outside.Finding]:
        """Look whether QEMU's user may use KVM, also where no key names it: KVM is the default."""
        return look_at_kvm(self.accelerator, self.user, is_set("accelerator"))
