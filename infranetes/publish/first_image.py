# SPDX-License-Identifier: Apache-2.0
"""`infranetes-guest first-image`: the guest image of a node that has none yet."""

from __future__ import annotations

import functools
import time
from pathlib import Path

from infranetes import config
from infranetes.guest import cli
from infranetes.guest import image as images
from infranetes.guest.build import build, say
from infranetes.guest.own_packages import downloaded
from infranetes.guest.reporting import reported

_QEMU = "qemu"  # the provider whose VMs boot the image


def build_first_image(file: Path) -> None:
    """Build the image where the configuration has VMs of QEMU and there is no image. See `build`."""
    directory = _directory(file)
    if directory is None:
        return
    say_so = functools.partial(say, time.monotonic())
    with reported(directory, say_so) as progress, downloaded(progress) as debs:
        made = build(directory, debs, progress)
    cli.show(made)


def _directory(file: Path) -> Path | None:
    """Return where an image is to be. None: no VM boots one, or it is there."""
    found = config.load(str(file), {})
    if _QEMU not in found.offered_providers:
        return None
    directory = Path(str(found.providers.get(_QEMU, {}).get("image_dir", images.DEFAULT_DIR)))
    try:
        images.current(directory)
    except images.NoGuestImage:
        return directory
    return None
