# SPDX-License-Identifier: Apache-2.0
"""`infranetes-guest first-image`: the guest image of a node that has none yet."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path

from infranetes import config
from infranetes.guest import cli
from infranetes.guest import image as images
from infranetes.guest.build import build, say
from infranetes.guest.own_packages import downloaded
from infranetes.guest.reporting import reported
from infranetes.volumes import mount_table
from infranetes_common.errors import FailedPrecondition

_QEMU = "qemu"  # the provider whose VMs boot the image
_PRIVATE = b"/systemd-private-"  # in the real path of what a service with PrivateTmp= has as /tmp or /var/tmp
_HIDDEN = (Path("/home"), Path("/run/user"))  # from infranetes.service


def build_first_image(file: Path) -> None:
    """Build the image where the configuration has VMs of QEMU and there is no image. See `build`."""
    directory = _directory(file)
    if directory is None:
        return
    _check_place(directory)
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


def _check_place(directory: Path) -> None:
    """Check that this service may write an image to a directory in which the daemon finds it.

    :raise FailedPrecondition: it may not; the message says how to change the service."""
    path = directory.resolve()
    mounts = mount_table.parse(Path(mount_table.TABLE).read_bytes())
    mount = mount_table.mount_of(mounts, os.fsencode(path))
    if _PRIVATE in mount.root:
        trouble = "is in a temporary directory that infranetes-guest.service has to itself"
        remedy = "run `systemctl edit infranetes-guest` and add PrivateTmp=no below [Service]"
    elif not mount.writable:
        trouble = "is read-only for infranetes-guest.service"
        remedy = (
            "make that directory, then run `systemctl edit infranetes-guest` and add "
            f"ReadWritePaths={path} below [Service]"
        )
        if any(path.is_relative_to(hidden) for hidden in _HIDDEN):
            remedy += f", and `systemctl edit infranetes` and add BindReadOnlyPaths={path}"
    else:
        return
    raise FailedPrecondition(
        f"providers.qemu.image_dir: {directory} {trouble}; choose another directory, such as "
        f"{images.DEFAULT_DIR}, or {remedy}"
    )
