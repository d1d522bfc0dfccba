# SPDX-License-Identifier: Apache-2.0
"""The loads of images, and of the layers that images share, into one VM; and their removal from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from twisted.internet.defer import DeferredSemaphore
from twisted.internet.interfaces import IDelayedCall

from infranetes_common.concurrency import Flight

if TYPE_CHECKING:
    from infranetes.pods.node.load_progress import ImageLoadProgress

STREAMS = 3  # layers that are sent into one VM at once


@attrs.define
class Loads:
    """The loads of one sandbox. They outlive the calls that asked for them, and end with the VM.

    :ivar images: the loads of images, by image id.
    :ivar layers: the loads of layers, by diff id; several may share a Flight.
    :ivar progress: the progress of images that are loaded as layers, by image id.
    :ivar arrived: how many bytes of a layer that is sent have left the node, by diff id.
    :ivar streams: held while a layer is sent.
    :ivar removal: removes the images that no container uses any more; no load begins before its end.
    :ivar removal_due: the timer of the next removal.
    """

    images: dict[str, Flight[None]] = attrs.field(factory=dict)
    layers: dict[str, Flight[None]] = attrs.field(factory=dict)
    progress: dict[str, ImageLoadProgress] = attrs.field(factory=dict)
    arrived: dict[str, int] = attrs.field(factory=dict)
    streams: DeferredSemaphore = attrs.field(factory=lambda: DeferredSemaphore(STREAMS))
    removal: Flight[None] | None = None
    removal_due: IDelayedCall | None = None

    @property
    def busy(self) -> bool:
        """Whether a load or a removal is under way."""
        flights = [*self.images.values(), *self.layers.values(), self.removal]
        return any(flight is not None and not flight.done for flight in flights)

    def flights(self) -> dict[str, Flight[None]]:
        """Return the loads of layers that are under way, by diff id."""
        self.layers = {diff_id: flight for diff_id, flight in self.layers.items() if not flight.done}
        return self.layers

    def cancel(self) -> None:
        """Cancel all loads and the removal, because the VM or the daemon is being ended. Idempotent."""
        due, self.removal_due = self.removal_due, None
        if due is not None and due.active():
            due.cancel()
        flights = [*self.images.values(), *self.layers.values()]
        if self.removal is not None:
            flights.append(self.removal)
        for flight in flights:
            if not flight.done:
                flight.cancel()
