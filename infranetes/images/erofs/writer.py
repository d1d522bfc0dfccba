# SPDX-License-Identifier: Apache-2.0
"""Writes an erofs image in one go: files' data as it comes, then directories, inodes and the first block.

Only the tree and small files are held. A file's data is in one piece, in the order of the tar; inodes are
together at the end, with links' targets, small directories and small files right behind theirs.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator

from infranetes.images.erofs import format
from infranetes.images.erofs.format import BLOCK, INODE, SLOT
from infranetes.images.erofs.limits import BadLayer
from infranetes.images.erofs.tree import Node, Tree

SMALL = 1024  # bytes of the largest file that is held, and put behind its inode
SMALL_TOTAL = 128 << 20  # bytes of all such files together
_FLUSH_BYTES, _FLUSH_PARTS = 1 << 20, 1000  # writev takes 1024 parts
_ZEROS = bytes(BLOCK)


class _Output:
    """A file that only grows, but for its first block. Written with few calls and without copying."""

    def __init__(self, descriptor: int) -> None:
        self.position = 0
        self._descriptor = descriptor
        self._parts: list[bytes | memoryview] = []
        self._pending = 0

    def append(self, data: bytes | memoryview) -> None:
        self._parts.append(data)
        self._pending += len(data)
        self.position += len(data)
        if self._pending >= _FLUSH_BYTES or len(self._parts) >= _FLUSH_PARTS:
            self.flush()

    def skip(self, size: int) -> None:
        """Leave a hole. Something has to follow."""
        self.flush()
        os.lseek(self._descriptor, size, os.SEEK_CUR)
        self.position += size

    def align(self) -> None:
        if rest := self.position % BLOCK:
            self.append(_ZEROS[rest:])

    def flush(self) -> None:
        while self._parts:
            written = os.writev(self._descriptor, self._parts)
            self._pending -= written
            if not self._pending:
                self._parts.clear()
                return
            while self._parts and written >= len(self._parts[0]):
                written -= len(self._parts.pop(0))
            if written:
                self._parts[0] = memoryview(self._parts[0])[written:]

    def first_block(self, data: bytes) -> None:
        self.flush()
        if os.pwrite(self._descriptor, data, 0) != len(data):
            raise OSError("short write")


class Writer:
    """The writer of one image.

    :param descriptor: an empty file, open for writing.
    """

    def __init__(self, descriptor: int, tree: Tree) -> None:
        self._out = _Output(descriptor)
        self._out.append(_ZEROS)
        self._tree = tree
        self._small = 0  # bytes of small files

    def store(self, node: Node, pieces: Iterable[memoryview | int]) -> None:
        """Write a regular file's data. :param pieces: data, and the lengths of holes."""
        if node.size <= SMALL and self._small + node.size <= SMALL_TOTAL:
            node.content = b"".join(bytes(piece) for piece in pieces)
            self._small += node.size
            return
        node.block = self._out.position // BLOCK
        for piece in pieces:
            if isinstance(piece, int):
                self._out.skip(piece)
            else:
                self._out.append(piece)
        self._out.align()

    def finish(self, uuid: bytes) -> None:
        """Write all the rest."""
        nodes = list(self._tree.walk())
        parents = {
            child: node
            for node in nodes
            if node.children
            for child in node.children.values()
            if child.children is not None
        }
        end = self._place(nodes)
        for node in nodes:
            self._write_data(node, parents)
        meta = self._out.position
        for node in nodes:
            self._pad(meta + node.number * SLOT - self._out.position)
            self._write_inode(node, parents)
        self._pad(meta + end - self._out.position)
        blocks = self._out.position // BLOCK
        if blocks >= format.MAX_BLOCKS:
            raise BadLayer("it is larger than an erofs image may be")
        root = self._tree.root.number
        self._out.first_block(
            format.super_block(
                root=root, inodes=len(nodes), blocks=blocks, meta_block=meta // BLOCK, uuid=uuid
            )
        )

    def _pad(self, size: int) -> None:
        while size > 0:
            self._out.append(_ZEROS[: min(size, BLOCK)])
            size -= BLOCK

    def _place(self, nodes: list[Node]) -> int:
        """Number the inodes; return the metadata's size.

        An inode and what is behind it share a block, as Linux wants it, unless its attributes alone fill one.
        The image does not end with an inode, since fsck.erofs 1.5 reads past each, attributes or not.
        """
        at = 2 * SLOT  # not 0: some programs skip inode 0 in directories
        for node in nodes:
            if node.children is not None:
                node.size = format.directory_blocks(_names(node))[1]
            size = INODE + len(format.xattrs(node.xattrs)) if node.xattrs else INODE
            size += node.size if _inline(node, size) else 0
            left = BLOCK - at % BLOCK
            at += left if size > left else 0
            node.number = at // SLOT
            at += size + -size % SLOT
        return at + BLOCK - at % BLOCK

    def _write_data(self, node: Node, parents: dict[Node, Node]) -> None:
        """Write what is in memory and has no place behind its inode."""
        size = INODE + len(format.xattrs(node.xattrs or {}))
        if _inline(node, size) or (node.children is None and node.content is None):
            return
        node.block = self._out.position // BLOCK
        for data in _directory(node, parents) if node.children is not None else (node.content or b"",):
            self._out.align()
            self._out.append(data)
        self._out.align()

    def _write_inode(self, node: Node, parents: dict[Node, Node]) -> None:
        xattrs = format.xattrs(node.xattrs or {})
        inline = _inline(node, INODE + len(xattrs))
        special = stat.S_ISCHR(node.mode) or stat.S_ISBLK(node.mode)
        self._out.append(
            format.inode(
                number=node.number,
                layout=format.INLINE if inline else format.PLAIN,
                mode=node.mode,
                size=node.size,
                place=node.device if special else node.block,
                uid=node.uid,
                gid=node.gid,
                mtime_ns=node.mtime_ns,
                nlink=node.links,
                xattr_bytes=len(xattrs),
            )
            + xattrs
        )
        if inline:
            data = node.content
            self._out.append(data if data is not None else b"".join(_directory(node, parents)))


def _inline(node: Node, size: int) -> bool:
    """Return whether a node's data is behind its inode. :param size: of the inode with its attributes."""
    return 0 < node.size <= BLOCK - size and (node.children is not None or node.content is not None)


def _names(node: Node) -> list[bytes]:
    assert node.children is not None
    return sorted((b".", b"..", *node.children))


def _directory(node: Node, parents: dict[Node, Node]) -> Iterator[bytes]:
    """Yield a directory's blocks, not padded."""
    assert node.children is not None
    special = {b".": node, b"..": parents.get(node, node)}
    for names in format.directory_blocks(_names(node))[0]:
        found = [(name, special.get(name) or node.children[name]) for name in names]
        yield format.directory_block([(name, child.number, child.mode) for name, child in found])
