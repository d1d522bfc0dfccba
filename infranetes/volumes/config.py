# SPDX-License-Identifier: Apache-2.0
"""`[volumes]` of the node's configuration."""

from __future__ import annotations

import re

import attrs
from attrs import Attribute
from attrs.validators import and_, ge, gt, lt

from infranetes.providers.volumes import is_volume_id
from infranetes_common.config import Bytes
from infranetes_common.filesync.manifest import Bounds

NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def _are_lent(instance: object, attribute: Attribute[tuple[str, ...]], value: tuple[str, ...]) -> None:
    for each in value:
        namespace, has_volume, volume = each.partition("/")
        if each != "*" and not (NAMESPACE.fullmatch(namespace) and (is_volume_id(volume) or not has_volume)):
            raise ValueError(f'{each[:80]!r} is neither NAMESPACE, "*" nor NAMESPACE/VOLUME')


@attrs.frozen
class VolumesConfig:
    """What of one mount is carried into a VM, and how often it is looked at."""

    max_bytes: Bytes = attrs.field(default=Bytes(256 * 1024 * 1024), validator=ge(Bytes(1)))
    max_entries: int = attrs.field(default=16384, validator=ge(1))
    interval: float = attrs.field(default=1.0, validator=gt(0))  # seconds between two looks
    show_space: bool = True  # have files on the node that show kubelet the use of emptyDirs in VMs
    # The share of the node's file system that these files leave free, so that kubelet evicts no pod for them.
    keep_free: float = attrs.field(default=0.2, validator=and_(ge(0.0), lt(1.0)))
    # The namespaces whose pods may have FlexVolumes: NAMESPACE, or "*" for all. NAMESPACE/VOLUME: of other
    # volumes this one too. Empty: no pod may have any.
    flexvolumes: tuple[str, ...] = attrs.field(default=(), validator=_are_lent)

    @property
    def bounds(self) -> Bounds:
        """Both limits of one mount."""
        return Bounds(self.max_entries, self.max_bytes)
