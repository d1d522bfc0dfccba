# SPDX-License-Identifier: Apache-2.0
"""Block devices of the node that pods may have: those that `providers.qemu.devices` lists, and no other.

As a volume such a device is `device:PATH`, which can't be a file's id.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from infranetes_common.errors import FailedPrecondition

_PREFIX = "device:"


class LentDevices:
    """The node's block devices that pods may have. Methods block.

    :param listed: paths, or links to them, of which some may be missing."""

    def __init__(self, listed: Sequence[str]) -> None:
        self._listed = listed

    def id_of(self, path: str) -> str:
        """Return the id of a block device as a volume. :raise FailedPrecondition: no pod may have it."""
        self._check(path)
        return _PREFIX + path

    def path_of(self, volume_id: str) -> Path | None:
        """Return the path of such a volume; None: it is another kind of volume.

        :raise FailedPrecondition: no pod may have it."""
        if not volume_id.startswith(_PREFIX):
            return None
        path = volume_id.removeprefix(_PREFIX)
        self._check(path)
        return Path(path)

    def _check(self, path: str) -> None:
        number = _number(path)
        if number is None:
            raise FailedPrecondition(
                f"{path} is no block device of this node, or not any more, or the daemon's unit hides it "
                f"(PrivateDevices=no, DeviceAllow={path} rw)"
            )
        if number not in {_number(each) for each in self._listed}:
            raise FailedPrecondition(
                f"{path} is a block device of the node, and pods may have those alone that the setting "
                "providers.qemu.devices lists. A raw volume (volumeMode: Block) is a disk of the pod's own"
            )


def _number(path: str) -> int | None:
    """Return the number of a block device; None: there is none at this path."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_rdev if stat.S_ISBLK(found.st_mode) else None
