# SPDX-License-Identifier: Apache-2.0
"""What `Control` does for kubelet's FlexVolume driver: the same as CSI's NodePublishVolume."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import PurePosixPath

import attrs
from twisted.logger import Logger

from infranetes.csi import checks
from infranetes.csi.publisher import Publisher
from infranetes.providers.volumes import FLEX_PREFIX
from infranetes.volumes import published
from infranetes.volumes.config import NAMESPACE
from infranetes.volumes.published import PublishedVolume
from infranetes_common.errors import (
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
)
from infranetes_common.volume_disks import FILESYSTEMS
from infranetes_common.wire import control
from infranetes_common.wire.control_rpcs import ControlVolumeRpcs
from txgrpc import Call

MAX_SIZE = 1 << 60  # bytes; providers allow less
_MAX_UID = 128
_MAX_NAMESPACE = 63
_PLAIN = re.compile(r"[a-z0-9.-]{1,62}[a-z0-9]")  # can be an id everywhere

_log = Logger()


class VolumeCalls(ControlVolumeRpcs):
    """One method per RPC.

    :param publisher: None: no provider has volumes. :param allowed: as in `VolumesConfig.flexvolumes`."""

    def __init__(self, publisher: Publisher | None, allowed: Iterable[str]) -> None:
        self._publisher = publisher
        self._allowed = frozenset(allowed)

    async def MountVolume(
        self, request: control.MountVolumeRequest, call: Call
    ) -> control.MountVolumeResponse:
        publisher = self._with_volumes()
        target = _target(request.target)
        if _pod(target) != checks.text("pod_uid", request.pod_uid, _MAX_UID):
            raise InvalidArgument(f"target: {target[:256]} does not belong to pod {request.pod_uid}")
        if not 0 <= request.size <= MAX_SIZE:
            raise InvalidArgument(f"size: a volume can't have {request.size} bytes")
        group = request.group if request.HasField("group") else None
        volume = PublishedVolume(
            checks.text("volume", request.volume, checks.MAX_ID),
            request.filesystem or FILESYSTEMS[0],
            read_only=request.read_only,
            group=group,
        )
        published.check(volume)
        namespace = checks.text("namespace", request.namespace, _MAX_NAMESPACE)
        if not NAMESPACE.fullmatch(namespace):
            raise InvalidArgument(f"namespace: {namespace!r} can't be a namespace's name")
        volume_id = await self._find(publisher, namespace, volume.volume, request.size)
        await publisher.publish(target, attrs.evolve(volume, volume=volume_id))
        return control.MountVolumeResponse(volume=volume_id)

    async def UnmountVolume(
        self, request: control.UnmountVolumeRequest, call: Call
    ) -> control.UnmountVolumeResponse:
        publisher, target = self._with_volumes(), _target(request.target)
        try:
            mounted = await publisher.find(target)
        except InfranetesError:
            mounted = None  # whatever is there is to be unmounted
        await publisher.unpublish(target, target if mounted is None else mounted.volume)
        return control.UnmountVolumeResponse()

    def _with_volumes(self) -> Publisher:
        if self._publisher is None:
            raise FailedPrecondition(
                "no provider of this node has volumes; docs/persistent-volumes.md says which ones can"
            )
        return self._publisher

    async def _find(self, publisher: Publisher, namespace: str, name: str, size: int) -> str:
        """Return the id of a volume, which is made if there is none and its size is given.

        :raise NotFound: there is none. :raise PermissionDenied: the namespace may not have it."""
        volumes = publisher.volumes
        if f"{namespace}/{name}" in self._allowed:
            return str((await volumes.get(name)).id)
        if not {namespace, "*"} & self._allowed:
            raise PermissionDenied(
                f"pods of namespace {namespace} may not have FlexVolumes, or not {name}: "
                "volumes.flexvolumes in the daemon's configuration says which may"
            )
        own = _own_name(namespace, name)
        try:
            return str((await volumes.get(own)).id)
        except NotFound:
            if not size:
                raise NotFound(
                    f"namespace {namespace} has no volume {name}: give its size, so that it is made, or have "
                    f"{namespace}/{name} added to volumes.flexvolumes if it was made elsewhere"
                ) from None
        with publisher.in_flight.only(own):
            disk = await volumes.create(own, -(-size // volumes.unit) * volumes.unit)
        _log.info(
            "volume {volume} is ready for {name}: {size} bytes", volume=disk.id, name=own, size=disk.size
        )
        return str(disk.id)


def _own_name(namespace: str, name: str) -> str:
    """Return the name of one of a namespace's own volumes. No other namespace's and none of CSI's has it.

    It is also the volume's id where ids are made of names. A namespace's name has no dot."""
    plain = f"{FLEX_PREFIX}{namespace}.{name}"
    if _PLAIN.fullmatch(plain):
        return plain
    return FLEX_PREFIX + hashlib.sha256(plain.encode()).hexdigest()[:40]


def _target(path: str) -> str:
    """Return the path, if kubelet can have volumes there. :raise InvalidArgument: it can't."""
    checks.text("target", path, checks.MAX_PATH)
    if not path.startswith("/") or str(PurePosixPath(path)) != path or ".." in path.split("/"):
        raise InvalidArgument(f"target: {path[:256]!r} is no plain absolute path")
    parts = path.split("/")
    if len(parts) < 6 or parts[-5] != "pods" or parts[-3] != "volumes" or "~" not in parts[-2]:
        raise InvalidArgument(f"target: {path[:256]!r} is not like /.../pods/UID/volumes/VENDOR~DRIVER/NAME")
    return path


def _pod(target: str) -> str:
    return target.split("/")[-4]
