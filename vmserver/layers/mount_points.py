# SPDX-License-Identifier: Apache-2.0
"""The mount points of layers: `l/NUMBER`, with a link from the layer's name to each.

The names are short because an overlay lists up to 200 of them in one page of options. The links outlive the
agent, and disappear with the mounts when the VM reboots.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from threading import Lock

from infranetes_common.errors import FailedPrecondition, Unavailable
from vmserver.machine.mounts import Flag, mount, unmount

KIND = "erofs"
# Neither noexec nor nosuid: programs run from an overlay, and the overlay's own options decide.
_FLAGS = Flag.READ_ONLY | Flag.NO_DEVICES
_STACKED = 16  # the most mounts on top of each other that are unmounted at one point


class MountPoints:
    """The mount points, in one directory. One call at a time for each layer. Blocks, but for `mounted`."""

    def __init__(self, directory: Path) -> None:
        self._points = directory / "l"
        self._links = directory / "of"
        self._lock = Lock()
        self._next = -1

    def mounted(self, diff_id: str) -> Path | None:
        """Return where a layer is mounted; None if it is not."""
        point = self._point(diff_id)
        return point if point is not None and os.path.ismount(point) else None

    def all(self) -> list[str]:
        """List the layers that have a mount point, by diff id."""
        try:
            return [f"sha256:{name}" for name in os.listdir(self._links)]
        except FileNotFoundError:
            return []

    def mount(self, diff_id: str, device: str) -> Path:
        """Mount a layer that is not mounted; return where.

        :raise FailedPrecondition: there is no layer on the device. :raise Unavailable: it can't be read.
        """
        try:
            point = self._point(diff_id) or self._new_point(diff_id)
            point.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise FailedPrecondition(f"no mount point can be made for layer {diff_id}: {error}") from None
        mount(device, str(point), KIND, _FLAGS)
        return point

    def unmount(self, diff_id: str) -> int | None:
        """Unmount a layer; return the device (`st_dev`) that it was on. None: it was not mounted.

        :raise Unavailable: it can't be unmounted.
        """
        point = self._point(diff_id)
        if point is None:
            return None
        device = None
        for _ in range(_STACKED):
            if not os.path.ismount(point):
                break
            device = point.stat().st_dev
            unmount(point)
        else:
            raise Unavailable(f"layer {diff_id} is still mounted at {point}")
        with contextlib.suppress(FileNotFoundError):
            (self._links / _name(diff_id)).unlink()
        with contextlib.suppress(OSError):
            point.rmdir()
        return device

    def _point(self, diff_id: str) -> Path | None:
        try:
            return self._points / os.path.basename(os.readlink(self._links / _name(diff_id)))
        except FileNotFoundError:
            return None

    def _new_point(self, diff_id: str) -> Path:
        """Make a directory whose number was not used before, and the link to it.

        A directory whose link was never made is left: it is empty, and in memory.
        """
        with self._lock:
            if self._next < 0:
                self._links.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._points.mkdir(mode=0o700, exist_ok=True)
                self._next = max(map(int, os.listdir(self._points)), default=-1) + 1
            point = self._points / str(self._next)
            self._next += 1
        point.mkdir(mode=0o700)
        (self._links / _name(diff_id)).symlink_to(os.path.join("..", "l", point.name))
        return point


def _name(diff_id: str) -> str:
    return diff_id.removeprefix("sha256:")
