# SPDX-License-Identifier: Apache-2.0
"""The progress of images that are loaded into a VM as layers: in the log, in messages and in figures."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from infranetes.images.layer_disk import LayerDisk
from infranetes.pods.node.inventory import Sandbox

EVERY_SECONDS = 5.0
_MB = 1e6
_MIB = 1 << 20

_log = Logger()


class ImageLoadProgress:
    """The progress of one image's load, logged every few seconds; a context manager.

    :ivar layers: how many layers were missing in the VM.
    """

    def __init__(self, clock: IReactorTime, sandbox: Sandbox, image_id: str) -> None:
        self.layers = 0
        self._clock = clock
        self._sandbox = sandbox
        self._image_id = image_id
        self._began = clock.seconds()
        self._disks: dict[str, LayerDisk] = {}
        self._there = 0  # bytes that had arrived before this load
        self._next: IDelayedCall | None = None

    def add_missing(self, missing: Sequence[LayerDisk]) -> None:
        """Count these layers as missing, unless they are counted already."""
        for disk in missing:
            if disk.diff_id not in self._disks:
                self._disks[disk.diff_id] = disk
                self._there += self._sandbox.loads.arrived.get(disk.diff_id, 0)
        self.layers = len(self._disks)

    @property
    def arrived(self) -> int:
        """The bytes of the missing layers that have been sent, including those sent before this load."""
        arrived = self._sandbox.loads.arrived
        return sum(arrived.get(diff_id, 0) for diff_id in self._disks)

    @property
    def size(self) -> int:
        """The size of the missing layers in bytes."""
        return sum(disk.size for disk in self._disks.values())

    def words(self) -> str:
        """Return the progress as a message."""
        if not self._disks:
            return f"the disks of image {self._image_id} are being made"
        return (
            f"{self.arrived / _MIB:.0f} of {self.size / _MIB:.0f} MiB of image {self._image_id} have been "
            "brought into its VM"
        )

    def figures(self) -> dict[str, object]:
        """Return the progress as figures by name. Sizes are bytes."""
        return {
            "image": self._image_id,
            "layers": self.layers,
            "arrived": self.arrived,
            "size": self.size,
            "seconds": round(self.seconds, 3),
        }

    @property
    def seconds(self) -> float:
        """The seconds since the load began."""
        return self._clock.seconds() - self._began

    def done(self) -> None:
        """Log that the image is loaded."""
        _log.info(
            "image {image} is in sandbox {sandbox}, {layers} layers were missing: {seconds:.2f} s",
            image=self._image_id,
            sandbox=self._sandbox.id,
            pod=self._sandbox.pod,
            layers=self.layers,
            seconds=self.seconds,
        )

    def __enter__(self) -> ImageLoadProgress:
        self._sandbox.loads.progress[self._image_id] = self
        self._next = self._clock.callLater(EVERY_SECONDS, self._tell)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._sandbox.loads.progress.pop(self._image_id, None)
        if self._next is not None and self._next.active():
            self._next.cancel()

    def _tell(self) -> None:
        self._next = self._clock.callLater(EVERY_SECONDS, self._tell)
        arrived = self.arrived
        _log.info(
            "image {image} is being sent to sandbox {sandbox}: {arrived} of {size} bytes, {layers} layers, "
            "{rate:.1f} MB/s, {seconds:.0f} s",
            image=self._image_id,
            sandbox=self._sandbox.id,
            pod=self._sandbox.pod,
            arrived=arrived,
            size=self.size,
            layers=self.layers,
            rate=(arrived - self._there) / self.seconds / _MB,
            seconds=self.seconds,
        )
