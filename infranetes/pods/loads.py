# SPDX-License-Identifier: Apache-2.0
"""What is on its way into one VM, or out of it again: images, and the layers that images share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from twisted.internet.defer import DeferredSemaphore
from twisted.internet.interfaces import IDelayedCall

from infranetes_common.concurrency import Flight

if TYPE_CHECKING:
    from infranetes.pods.load_progress import Progress

STREAMS = 3  # layers that are sent into one VM at once


@attrs.define
class Loads:
    """The work for one sandbox. It outlives the calls that want it, and ends with the VM.

    :ivar images: by id, those on their way.
    :ivar layers: by diff id, those on their way; several may share a Flight.
    :ivar progress: by id, of the images on their way as layers.
    :ivar arrived: by diff id, how many bytes of a layer that is sent have left the node.
    :ivar streams: held while a layer is sent.
    :ivar removal: of images that no container uses any more; no load begins before its end.
    :ivar removal_due: when that is looked for next.
    """

    images: dict[str, Flight[None]] = attrs.field(factory=dict)
    layers: dict[str, Flight[None]] = attrs.field(factory=dict)
    progress: dict[str, Progress] = attrs.field(factory=dict)
    arrived: dict[str, int] = attrs.field(factory=dict)
    streams: DeferredSemaphore = attrs.field(factory=lambda: DeferredSemaphore(STREAMS))
    removal: Flight[None] | None = None
    removal_due: IDelayedCall | None = None

    @property
    def busy(self) -> bool:
        """Whether anything is on its way."""
        flights = [*self.images.values(), *self.layers.values(), self.removal]
        return any(flight is not None and not flight.done for flight in flights)

    def flights(self) -> dict[str, Flight[None]]:
        """The layers that are on their way now."""
        self.layers = {diff_id: flight for diff_id, flight in self.layers.items() if not flight.done}
        return self.layers

    def cancel(self) -> None:
        """End all of it: the VM is being ended, or the daemon. Idempotent."""
        due, self.removal_due = self.removal_due, None
        if due is not None and due.active():
            due.cancel()
        flights = [*self.images.values(), *self.layers.values()]
        if self.removal is not None:
            flights.append(self.removal)
        for flight in flights:
            if not flight.done:
                flight.cancel()
