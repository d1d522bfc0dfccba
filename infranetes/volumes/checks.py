# SPDX-License-Identifier: Apache-2.0
"""Checks of a container's request for a volume: a file system as a mount, a raw volume as a device."""

from __future__ import annotations

from infranetes.volumes.published import PublishedVolume
from infranetes_common.errors import FailedPrecondition
from infranetes_common.wire import cri


def describe_device(index: int, device: cri.Device) -> str:
    """Return a container's device as messages name it."""
    return f"config.devices[{index}] ({device.host_path[:256]} at {device.container_path[:256]})"


def is_root(device: cri.Device) -> bool:
    """Whether a container's device is to be the root of its VM."""
    return device.container_path.startswith("/") and not device.container_path.strip("/")


def check_root(config: cri.ContainerConfig, device: cri.Device, volume: PublishedVolume) -> None:
    """Check that a volume can be the root of a container's VM. :raise FailedPrecondition: it can't."""
    check_device(config, volume)
    if volume.read_only or "w" not in (device.permissions or "rwm"):
        raise FailedPrecondition(f"volume {volume.volume} is read-only, and a root is written to")


def check_mount(mount: cri.Mount, volume: PublishedVolume) -> None:
    """Check that a container may mount a volume. :raise FailedPrecondition: it may not."""
    if volume.raw:
        raise FailedPrecondition(
            f"volume {volume.volume} is a raw block device (volumeMode: Block), which is no mount: name it "
            "among the container's volumeDevices"
        )
    if mount.uidMappings or mount.gidMappings:
        raise FailedPrecondition("a volume can't be mounted with mapped ids yet: leave out hostUsers: false")


def check_device(config: cri.ContainerConfig, volume: PublishedVolume) -> None:
    """Check that a container may have a volume as a device. :raise FailedPrecondition: it may not."""
    if not volume.raw:
        raise FailedPrecondition(
            f"volume {volume.volume} has a file system (volumeMode: Filesystem), and is no device: name it "
            "among the container's volumeMounts"
        )
    options = config.linux.security_context.namespace_options
    if options.userns_options.mode == cri.POD and options.HasField("userns_options"):
        raise FailedPrecondition(
            "the users of a pod with a user namespace may not open a disk: leave out hostUsers: false"
        )
