# SPDX-License-Identifier: Apache-2.0
"""Layers laid over each other: a container's root directory, and images as volumes.

Every function blocks: call it in a thread. Source: the kernel's filesystems/overlayfs.rst.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from infranetes_common.errors import FailedPrecondition
from vmserver.machine.mounts import NO_FLAGS, Flag, in_directory, mount, unmount

MAX_LAYERS = 200
"""The most layers of one overlay. The kernel takes 500, and a page of options the names of as many."""

_KIND = "overlay"
_OPAQUE = "trusted.overlay.opaque"
_VOLUME = Flag.READ_ONLY | Flag.NO_SETID | Flag.NO_DEVICES | Flag.NO_EXEC
_SEPARATORS = frozenset(",:\\\n")  # special in an overlay's options or in a mount table


def mount_rootfs(layers: Sequence[Path], upper: Path, work: Path, at: Path) -> None:
    """Mount a file system that may be written to over an image's layers.

    :param layers: where they are mounted, lowest first. A layer may come more than once, or none at all.
    :param upper: an empty directory, or that of an earlier mount; what is written is kept here.
    :param work: an empty directory beside `upper`, or that of an earlier mount.
    :raise FailedPrecondition: there are too many layers, or the kernel refuses.
    :raise Unavailable: a directory is not there.
    """
    lower = _lower(layers)
    if not lower:
        mount(str(upper), str(at), "", Flag.BIND)
        return
    _check_names(upper, work)
    _overlay(lower, at, NO_FLAGS, f",upperdir={upper.absolute()},workdir={work.absolute()}")


def mount_volume(layers: Sequence[Path], at: Path) -> None:
    """Mount layers to be read: nothing can be written or run there, and no device opened.

    :param layers: where they are mounted, lowest first.
    :raise FailedPrecondition: there are too many layers, or the kernel refuses.
    :raise Unavailable: a directory is not there.
    """
    lower = _lower(layers)
    if len(lower) > 1:
        _overlay(lower, at, _VOLUME, "")
    elif lower:  # an overlay needs two layers at least
        mount(str(lower[0]), str(at), "", Flag.BIND)
        try:
            mount("", str(at), "", Flag.BIND | Flag.REMOUNT | _VOLUME)
        except BaseException:
            unmount(at)
            raise
    else:
        mount("tmpfs", str(at), "tmpfs", _VOLUME, "mode=0755,size=4k")


def _lower(layers: Sequence[Path]) -> list[Path]:
    """Return each layer once, the highest first: what a layer holds, its own lower copy can't change.

    Layers below one with an opaque root are left out: overlayfs itself ignores that attribute of a root.
    """
    found = list(dict.fromkeys(reversed(layers)))
    found = found[: next((count for count, one in enumerate(found, 1) if _hides_all(one)), len(found))]
    if len(found) > MAX_LAYERS:
        raise FailedPrecondition(
            f"the image has {len(found)} layers: at most {MAX_LAYERS} can be mounted; squash some of them"
        )
    return found


def _hides_all(layer: Path) -> bool:
    with contextlib.suppress(OSError):  # a layer without the attribute
        return os.getxattr(layer, _OPAQUE) == b"y"
    return False


def _overlay(lower: Sequence[Path], at: Path, flags: Flag, options: str) -> None:
    """Mount an overlay; its layers' names are those from the directory that all of them are in."""
    top = Path(os.path.commonpath([layer.absolute().parent for layer in lower]))
    names = [layer.absolute().relative_to(top) for layer in lower]
    _check_names(*names)
    data = f"lowerdir={':'.join(map(str, names))}{options}"
    where = str(at.absolute())
    in_directory(top, lambda: mount(_KIND, where, _KIND, flags, data))


def _check_names(*paths: Path) -> None:
    for path in paths:
        if _SEPARATORS & set(str(path)):
            raise FailedPrecondition(f"{path}: an overlay takes no directory with such a name")
