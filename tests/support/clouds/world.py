# SPDX-License-Identifier: Apache-2.0
"""The interface that all simulated clouds share, for tests that work with any of them."""

from __future__ import annotations

from typing import Any, Protocol

from tests.support.clouds.faults import Faults
from tests.support.clouds.vm_image_instances import RunningVM, VMImageInstances


class World(Protocol):
    """One test's cloud.

    :ivar faults: what goes wrong. :ivar behaviour: of VMs that are launched from now on.
    :ivar requests: all requests, each with its `Action`. :ivar vm_images: its images of VM-image pods.
    """

    faults: Faults
    behaviour: str
    requests: list[dict[str, str]]
    vm_images: VMImageInstances

    def start(self) -> None:
        """Start it, with everything that a provider's configuration names."""

    async def stop(self) -> None:
        """Stop everything."""

    def table(self) -> dict[str, Any]:  # Any: TOML
        """Return the provider's configuration for this cloud."""
        raise NotImplementedError

    def seen(self) -> list[RunningVM]:
        """Return VMs that have not ended."""
        raise NotImplementedError

    def held(self) -> dict[str, str]:
        """Return descriptions of everything that costs money, with the token that it is tagged with."""
        raise NotImplementedError

    def holdings(self) -> list[str]:
        """Return descriptions of everything that costs money."""
        raise NotImplementedError

    def end(self, id: str, /) -> None:
        """End a VM, as somebody else would."""

    async def machine_image(self, name: str, /) -> str:
        """Return the id of a new image of VM-image pods, called `name` (NAME:VERSION)."""
        raise NotImplementedError

    def deregister(self, image: str, /) -> None:
        """Remove an image, as somebody else would."""
