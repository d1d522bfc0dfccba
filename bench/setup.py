# SPDX-License-Identifier: Apache-2.0
"""The setup of the benches' VMs on QEMU, which the command line chooses."""

from __future__ import annotations

from pathlib import Path

import attrs

from infranetes.guest.image import DEFAULT_DIR
from infranetes.providers.qemu.settings import ACCELERATORS

TEMPLATES = Path("/var/lib/infranetes/bench")  # kept, so that the second run finds the template
DOCKER_ALONE = Path(f"{DEFAULT_DIR}-docker")


@attrs.frozen
class Setup:
    """The guest image and how QEMU runs it.

    :ivar accelerator: auto, kvm or tcg. With kvm, the benches that need QEMU do not run where KVM is missing.
    :ivar image_dir: of the guest image; None: what `make image` or, for Docker, `make image-docker` makes.
    """

    accelerator: str = attrs.field(default="auto", validator=attrs.validators.in_(ACCELERATORS))
    image_dir: Path | None = None

    def guest(self, docker: bool = False) -> Path:
        """Return the directory of the guest image. :param docker: whether to take the one with Docker."""
        if self.image_dir is not None:
            return self.image_dir
        return DOCKER_ALONE if docker else DEFAULT_DIR

    def qemu(self, docker: bool = False) -> dict[str, object]:
        """Return the table `providers.qemu` of a bench's daemon. :param docker: see `guest`."""
        return {
            "accelerator": self.accelerator,
            "image_dir": str(self.guest(docker)),
            "template_dir": str(TEMPLATES),
            "bridge": "infrabench0",
            "pod_cidr": "10.216.0.0/24",
            "mtu": 1400,  # benches run in a network of their own, with no uplink from which to take it
            # Not those of this machine's daemon: it would end the VMs, taking their users for its own.
            "uids": "1900020000-1900029999",
        }
