# SPDX-License-Identifier: Apache-2.0
"""Checks of CSI requests, and translations from CSI's terms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import attrs

from infranetes.volumes.published import MAX_GROUP
from infranetes_common.errors import InvalidArgument
from infranetes_common.volume_disks import FILESYSTEMS, checked_options
from infranetes_common.wire import csi
from txgrpc import Code, GrpcError

MAX_ID = 128  # bytes, as in CSI
MAX_PATH = 4096
_READ_ONLY = csi.VolumeCapability.AccessMode.SINGLE_NODE_READER_ONLY
_MODES = (
    csi.VolumeCapability.AccessMode.SINGLE_NODE_WRITER,
    csi.VolumeCapability.AccessMode.SINGLE_NODE_SINGLE_WRITER,
    csi.VolumeCapability.AccessMode.SINGLE_NODE_MULTI_WRITER,
    _READ_ONLY,
)


class IsOfVolume(Protocol):
    """A request about one volume."""

    @property
    def volume_id(self) -> str: ...


@attrs.frozen
class VolumeAccess:
    """The way a pod wants a volume. :ivar filesystem: "": no file system but the disk itself."""

    filesystem: str
    mount_flags: tuple[str, ...]
    read_only: bool
    group: int | None


def volume_id(request: IsOfVolume) -> str:
    """Return the id in a request. :raise InvalidArgument: there is none, or it can't be one."""
    return text("volume_id", request.volume_id, MAX_ID)


def text(name: str, value: str, most: int) -> str:
    """Return a field that has to be given. :raise InvalidArgument: it is empty or too long, or no text."""
    if not value:
        raise InvalidArgument(f"{name} is missing")
    if len(value.encode()) > most:
        raise InvalidArgument(f"{name} has over {most} bytes: {value[:80]!r}...")
    if not value.isprintable():
        raise InvalidArgument(f"{name} has characters that can't be shown: {value[:80]!r}")
    return value


def capability(volume_capability: csi.VolumeCapability) -> VolumeAccess:
    """Translate a capability. :raise InvalidArgument: it is not supported; the message says what is."""
    mode = volume_capability.access_mode.mode
    if mode not in _MODES:
        names = csi.VolumeCapability.AccessMode.Mode
        shown = names.Name(mode) if mode in names.values() else str(mode)
        raise InvalidArgument(
            f"access_mode {shown}: a volume is a disk of one pod's VM at a time; ask for ReadWriteOncePod or "
            "ReadWriteOnce"
        )
    access_type = volume_capability.WhichOneof("access_type")
    if access_type == "block":
        return VolumeAccess("", (), mode == _READ_ONLY, None)
    if access_type != "mount":
        raise InvalidArgument(
            "access_type is missing: a volume is a file system (volumeMode: Filesystem) or a raw disk (Block)"
        )
    mount = volume_capability.mount
    if mount.fs_type and mount.fs_type not in FILESYSTEMS:
        raise InvalidArgument(
            f"fs_type: {mount.fs_type[:80]!r} is not offered; known are {' and '.join(FILESYSTEMS)}"
        )
    filesystem = mount.fs_type or FILESYSTEMS[0]
    options = tuple(checked_options(mount.mount_flags))
    return VolumeAccess(filesystem, options, mode == _READ_ONLY, _group(mount.volume_mount_group))


def capabilities(volume_capabilities: Iterable[csi.VolumeCapability]) -> None:
    """Check a volume's capabilities. :raise InvalidArgument: there are none, or one is not supported."""
    several = list(volume_capabilities)
    if not several:
        raise InvalidArgument("volume_capabilities are missing")
    for each in several:
        capability(each)


def parameters(class_parameters: Mapping[str, str], kind: str = "StorageClass") -> None:
    """Check the parameters of a StorageClass, or of another `kind`, except those of the sidecars.

    :raise InvalidArgument: a parameter that does nothing."""
    for name in sorted(class_parameters):
        if not name.startswith("csi.storage.k8s.io/"):
            raise InvalidArgument(f"parameters: {name[:80]!r} is unknown; leave it out of the {kind}")


def size(capacity_range: csi.CapacityRange, default: int, unit: int) -> int:
    """Return the size of a volume that is to be made or enlarged, in whole units.

    :raise InvalidArgument: the range can't be. :raise GrpcError: OUT_OF_RANGE: no whole units are in it."""
    least, most = capacity_range.required_bytes, capacity_range.limit_bytes
    if least < 0 or most < 0 or (most and most < least):
        raise InvalidArgument(f"capacity_range: {least} to {most} bytes is no range")
    if not least and most:
        default = min(default, most // unit * unit)
    chosen = -(-(least or default) // unit) * unit
    if not chosen or (most and chosen > most):
        raise GrpcError(
            Code.OUT_OF_RANGE, f"capacity_range: volumes have multiples of {unit} bytes; {most} is too little"
        )
    return chosen


def in_range(capacity_range: csi.CapacityRange, has: int) -> bool:
    """Return whether the size of an existing volume is in the range asked for."""
    return capacity_range.required_bytes <= has and (
        not capacity_range.limit_bytes or has <= capacity_range.limit_bytes
    )


def _group(value: str) -> int | None:
    if not value:
        return None
    if not value.isascii() or not value.isdigit() or len(value) > 10 or int(value) > MAX_GROUP:
        raise InvalidArgument(f"volume_mount_group: {value[:80]!r} is no group's id")
    return int(value)


class InFlight:
    """The calls in progress. By CSI's rules a second call for the same volume is refused, not queued."""

    def __init__(self) -> None:
        self._keys: set[str] = set()

    @contextmanager
    def only(self, key: str) -> Iterator[None]:
        """Hold a key exclusively. :raise GrpcError: ABORTED: another call holds it."""
        if key in self._keys:
            raise GrpcError(
                Code.ABORTED, f"another call for volume {key[:80]!r} is under way; try again later"
            )
        self._keys.add(key)
        try:
            yield
        finally:
            self._keys.discard(key)
