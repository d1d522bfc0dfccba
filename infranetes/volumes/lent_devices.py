# SPDX-License-Identifier: Apache-2.0
"""Block devices of the node that containers ask for: volumes of a provider that lends them, or refused.

All other devices that a container asks for are the VM's own: whether it has them is its agent's to say.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from infranetes.providers.interface import IPodProvider
from infranetes.providers.volumes import IHasVolumes, ILendsDevices
from infranetes.volumes.published import PublishedVolume
from infranetes_common.errors import FailedPrecondition
from infranetes_common.wire import cri

FindBlockDevices = Callable[[Sequence[str]], Awaitable[Sequence[str]]]
"""Look up the block devices of the node at paths, without links; "": none."""


class LentDevices:
    """The node's block devices as volumes that are raw."""

    def __init__(self, find: FindBlockDevices) -> None:
        self._find = find

    async def with_devices(self, config: cri.ContainerConfig, provider: IPodProvider) -> cri.ContainerConfig:
        """Return `config` with devices instead of mounts of block devices (hostPath of the type BlockDevice),
        if the provider lends any."""
        lender = _lender(provider)
        if lender is None or not lender.lends:
            return config
        paths = [one.host_path for one in config.mounts if one.host_path.startswith("/")]
        found = dict(zip(paths, await self._find(paths), strict=True))
        if not any(found.values()):
            return config
        changed = cri.ContainerConfig()
        changed.CopyFrom(config)
        del changed.mounts[:]
        for mount in config.mounts:
            if path := found.get(mount.host_path):
                permissions = "r" if mount.readonly else "rwm"
                changed.devices.add(
                    host_path=path, container_path=mount.container_path, permissions=permissions
                )
            else:
                changed.mounts.append(mount)
        return changed

    async def volume_at(self, path: str, provider: IPodProvider) -> PublishedVolume | None:
        """Return a device of the node as a volume; None: there is no block device at this path.

        :raise FailedPrecondition: pods may not have it."""
        [found] = await self._find([path])
        if not found:
            return None
        lender = _lender(provider)
        if lender is None:
            raise FailedPrecondition(
                f"{found} is a block device of the node, and VMs of provider {provider.name} can have none. "
                "A raw volume (volumeMode: Block) is a disk of the pod's own"
            )
        return PublishedVolume(await lender.lend(found), "")


def _lender(provider: IPodProvider) -> ILendsDevices | None:
    volumes = provider.volumes if IHasVolumes.providedBy(provider) else None
    return volumes if ILendsDevices.providedBy(volumes) else None
