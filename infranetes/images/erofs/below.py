# SPDX-License-Identifier: Apache-2.0
"""The layers below one that is being made, as `writer` has written them: for what its tar takes from them.

Where a layer is unpacked onto the ones below, as containerd does, a hard link to one of their files has
overlayfs copy that, and a directory without an entry stays as it was. Here the layer's own image has copies.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence

from infranetes.images.erofs import format
from infranetes.images.erofs.format import BLOCK, SLOT

OPAQUE = b"trusted.overlay.opaque"
_CHUNK = 1 << 20


class File:
    """A file of an image.

    :ivar key: what it is known by among all files of all images below.
    :ivar place: of a device, which one it is.
    """

    def __init__(self, image: LayerImage, number: int) -> None:
        self.key = (image.descriptor, number)
        self._image, self._number = image, number
        at = image.meta + number * SLOT
        self.mode, self.size, self.place, self.uid, self.gid, self.mtime_ns, own, inline = format.read_inode(
            image.read(at, format.INODE)
        )
        self.xattrs = format.read_xattrs(image.read(at + format.INODE, own))
        self._at = at + format.INODE + own if inline else self.place * BLOCK

    @property
    def directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def whiteout(self) -> bool:
        return stat.S_ISCHR(self.mode) and self.place == 0

    def child(self, name: bytes) -> File | None:
        """Return the file of this name in a directory; None: there is none, or this is no directory."""
        if not self.directory:
            return None
        number = self._image.names(self._number, self._at, self.size).get(name)
        return None if number is None else File(self._image, number)

    def pieces(self) -> Iterator[memoryview | int]:
        """Yield a regular file's or symbolic link's data, and the lengths of its holes."""
        for at in range(0, self.size, _CHUNK):
            data = self._image.read(self._at + at, min(_CHUNK, self.size - at))
            yield memoryview(data) if data.strip(b"\0") else len(data)


class LayerImage:
    """An image of a layer, open at `descriptor`."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        root, meta = format.read_super_block(self.read(0, BLOCK))
        self.meta = meta * BLOCK
        self._names: dict[int, dict[bytes, int]] = {}
        self.root = File(self, root)

    def read(self, at: int, size: int) -> bytes:
        """Return these bytes. :raise OSError: the image ends before."""
        os.lseek(self.descriptor, at, os.SEEK_SET)
        data = b""
        while len(data) < size:
            piece = os.read(self.descriptor, size - len(data))
            if not piece:
                raise OSError("the image of a layer below is cut off")
            data += piece
        return data

    def names(self, number: int, at: int, size: int) -> dict[bytes, int]:
        """Return the numbers of a directory's files by name. :param at: where its data begins."""
        if number not in self._names:
            blocks = [self.read(at + each, min(BLOCK, size - each)) for each in range(0, size, BLOCK)]
            self._names[number] = {
                name: child for block in blocks for name, child in format.read_directory_block(block)
            }
        return self._names[number]


class Below:
    """The layers below. :param descriptors: their images', lowest first."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._images = [LayerImage(descriptor) for descriptor in reversed(descriptors)]

    def find(self, parts: Sequence[bytes]) -> File | list[bytes] | None:
        """Return the file at a path, as overlayfs shows it; None: there is none.

        If a symbolic link is on its way, return the path to which that leads instead."""
        if not self._images:
            return None
        seen = [image.root for image in self._images]
        for index, part in enumerate(parts):
            if stat.S_ISLNK(seen[0].mode):
                content = b"".join(map(bytes, seen[0].pieces()))
                return followed(parts[: index - 1], content, parts[index:])
            directories, seen = seen, []
            for directory in directories:
                child = directory.child(part)
                if child is None:
                    continue
                if child.whiteout or (seen and not child.directory):
                    break
                seen.append(child)
                if not child.directory or child.xattrs.get(OPAQUE) == b"y":
                    break
            if not seen:
                return None
        return seen[0]


def followed(before: Sequence[bytes], link: bytes, after: Sequence[bytes]) -> list[bytes]:
    """Return the path that a symbolic link leads to. :param before: the path of the link's directory."""
    way = [] if link.startswith(b"/") else list(before)
    for part in (*link.split(b"/"), *after):
        if part == b"..":
            way = way[:-1]
        elif part not in (b"", b"."):
            way.append(part)
    return way
