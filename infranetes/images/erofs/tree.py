# SPDX-License-Identifier: Apache-2.0
"""The tree that a layer's entries make, by OCI's rules, as overlayfs wants a lower directory.

Names in a tar say what is removed of the layers below (whiteouts): `.wh.NAME` becomes a character device 0:0
called NAME, and `.wh..wh..opq` an attribute of its directory. Nothing here touches a file system: a path
leads through the tree in memory, and symbolic links on its way are followed there, within the tree.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator

from infranetes.images.erofs import format, tar
from infranetes.images.erofs.below import OPAQUE, Below, File, followed
from infranetes.images.erofs.limits import BadLayer, Incomplete, Limits, quoted
from infranetes.images.erofs.tar import Entry

_WHITEOUT, _META, _OPAQUE_MARK = b".wh.", b".wh..wh.", b".wh..wh..opq"
_OVERLAY = (b"trusted.overlay.", b"user.overlay.")  # another machine's overlayfs wrote these
_MAX_LINKS = 40  # the kernel's own limit
_MAX_STEPS = 4096
_OVERHEAD = 64  # the memory that a name or an attribute takes besides its bytes
_TYPES = {
    tar.FILE: stat.S_IFREG,
    tar.SYMLINK: stat.S_IFLNK,
    tar.CHAR: stat.S_IFCHR,
    tar.BLOCK_DEVICE: stat.S_IFBLK,
    tar.DIRECTORY: stat.S_IFDIR,
    tar.FIFO: stat.S_IFIFO,
}


class Node:
    """A file of any type. Several names may lead to one that is not a directory.

    :ivar children: of a directory, by name.
    :ivar content: a symbolic link's target, or a small file's data.
    :ivar block: where the data of other files is.
    :ivar device: which device it is.
    :ivar number, links: the inode's, once the whole tree is known.
    """

    __slots__ = (
        *("mode", "uid", "gid", "mtime_ns", "size", "xattrs", "children", "content", "block", "device"),
        *("number", "links"),
    )

    def __init__(self, mode: int, uid: int = 0, gid: int = 0, mtime_ns: int = 0) -> None:
        self.mode, self.uid, self.gid, self.mtime_ns = mode, uid, gid, mtime_ns
        self.size = self.block = self.device = self.number = self.links = 0
        self.xattrs: dict[bytes, bytes] | None = None
        self.children: dict[bytes, Node] | None = {} if stat.S_ISDIR(mode) else None
        self.content: bytes | None = None

    @property
    def whiteout(self) -> bool:
        """Whether the node removes the file of its name in the layers below."""
        return stat.S_ISCHR(self.mode) and self.device == 0


def _directory() -> Node:
    return Node(stat.S_IFDIR | 0o755)


class Tree:
    """The files of a layer, built up entry by entry with `add`.

    :param below: the layers below, for what the entries take from them; None: not known.
    :ivar copied: files of these whose data is to be stored.
    """

    def __init__(self, limits: Limits, below: Below | None = None) -> None:
        self.root = _directory()
        self.copied: list[tuple[Node, File]] = []
        self._below = below
        self._copies: dict[tuple[int, int], Node] = {}  # by the key of what they are copies of
        self._implied: dict[Node, list[bytes]] = {}  # directories that no entry describes, with their paths
        self._limits = limits
        self._nodes = 1
        self._held = 0
        self._bytes = self._holes = 0
        self._last: tuple[list[bytes], Node] | None = None  # where the last path led

    def add(self, entry: Entry) -> Node | None:
        """Put an entry where it belongs. Returns the regular file whose data is to follow, if it is one.

        :raise BadLayer: it can't be there, or is too much.
        """
        try:
            return self._add(entry)
        except BadLayer as e:
            raise type(e)(f"its entry {quoted(entry.path)} can't be made: {e}") from None

    def hold(self, size: int) -> None:
        """Account for bytes that stay in memory. :raise BadLayer: it is too much."""
        self._held += size
        if self._held > self._limits.held_bytes:
            raise BadLayer(
                "its names, links and attributes take too much space; split it into several layers"
            )

    def complete(self) -> None:
        """Give directories that no entry describes the attributes that they have in the layers below.

        Many tars have files without their directories: /tmp of such a layer would be root's alone.

        :raise Incomplete: the layers below are not known.
        """
        for node, parts in self._implied.items():
            if self._below is None:
                raise Incomplete(f"the directory {quoted(b'/'.join(parts))} has no entry in it")
            below = None if self._hidden(parts) else self._below.find(parts)
            if isinstance(below, File) and below.directory:
                node.mode, node.mtime_ns = below.mode, below.mtime_ns
                node.uid, node.gid = below.uid, below.gid
                kept = {name: value for name, value in below.xattrs.items() if name != OPAQUE}
                self._check_xattrs(kept)
                node.xattrs = {**kept, **(node.xattrs or {})} or None  # its own may be that it is opaque

    def _hidden(self, parts: list[bytes]) -> bool:
        """Whether this layer hides what the layers below have at a path of directories."""
        node = self.root
        for part in parts:
            if node.xattrs is not None and OPAQUE in node.xattrs:
                return True
            child = _children(node).get(part)
            if child is None or child.children is None:
                return True  # it was replaced, and nobody sees it
            node = child
        return False

    def _add(self, entry: Entry) -> Node | None:
        parts = _parts(entry.path)
        if not parts:
            if entry.kind != tar.DIRECTORY:
                raise BadLayer("the root is a directory")
            self._describe(self.root, entry)
            return None
        if parts[0].startswith(_META) and parts[0] != _OPAQUE_MARK:
            return None  # aufs's own bookkeeping
        parent, name = self._parent(parts[:-1], make=True), parts[-1]
        if name == _OPAQUE_MARK:
            self._make_opaque(parent)
        elif name.startswith(_WHITEOUT):
            self._whiteout(parent, name[len(_WHITEOUT) :])
        elif entry.kind == tar.LINK:
            self._put(parent, name, self._linked(entry.target))
        else:
            return self._make(parent, name, entry)
        return None

    def _make(self, parent: Node, name: bytes, entry: Entry) -> Node | None:
        earlier = _children(parent).get(name)
        if entry.kind == tar.DIRECTORY and earlier is not None and earlier.children is not None:
            self._describe(earlier, entry)
            return None
        node = Node(_TYPES[entry.kind])
        node.device = format.device(entry.major, entry.minor)
        if node.children is not None and earlier is not None and earlier.whiteout:
            self._make_opaque(node)  # nothing of the removed directory shows through the new one
        self._describe(node, entry)
        if entry.kind == tar.SYMLINK:
            if not entry.target:
                raise BadLayer("it is a symbolic link to nothing")
            node.content, node.size = entry.target, len(entry.target)
            node.mode = stat.S_IFLNK | 0o777  # the mode of all symbolic links in Linux
            self.hold(node.size)
        self._put(parent, name, node)
        self._bytes += entry.size
        self._check_sizes()
        if entry.kind != tar.FILE:
            return None
        node.size = entry.size
        self._holes += max(entry.size - entry.stored, 0)
        self._check_sizes()
        return node

    def _describe(self, node: Node, entry: Entry) -> None:
        self._implied.pop(node, None)
        node.mode = stat.S_IFMT(node.mode) | entry.mode
        node.uid, node.gid, node.mtime_ns = entry.uid, entry.gid, entry.mtime_ns
        opaque = node.xattrs is not None and OPAQUE in node.xattrs
        node.xattrs = None
        if entry.xattrs:
            kept = {
                n: v for n, v in entry.xattrs.items() if format.can_keep(n) and not n.startswith(_OVERLAY)
            }
            self._check_xattrs(kept)
            node.xattrs = kept or None
            opaque = opaque or (node.children is not None and entry.xattrs.get(OPAQUE) == b"y")
        if opaque:
            self._make_opaque(node)

    def _check_xattrs(self, attributes: dict[bytes, bytes]) -> None:
        size = sum(len(name) + len(value) for name, value in attributes.items())
        if size > self._limits.xattr_bytes:
            raise BadLayer(f"its extended attributes have over {self._limits.xattr_bytes} bytes")
        self.hold(size + _OVERHEAD * len(attributes))

    def _make_opaque(self, node: Node) -> None:
        """Hide what the layers below have in this directory."""
        node.xattrs = {**(node.xattrs or {}), OPAQUE: b"y"}
        self.hold(len(OPAQUE) + _OVERHEAD)

    def _put(self, parent: Node, name: bytes, node: Node) -> None:
        if len(name) > format.MAX_NAME:
            raise BadLayer(f"the name {quoted(name)} has over {format.MAX_NAME} bytes")
        self._nodes += 1
        if self._nodes > self._limits.entries:
            raise BadLayer(f"the layer has over {self._limits.entries} files; split it into several layers")
        self.hold(len(name) + _OVERHEAD)
        children = _children(parent)
        if name in children:
            self._last = None  # the last path may have led through the replaced file
        children[name] = node

    def _whiteout(self, parent: Node, name: bytes) -> None:
        if name in (b"", b".", b".."):
            raise BadLayer("it removes a file whose name can't exist")
        earlier = _children(parent).get(name)
        if earlier is None:
            self._put(parent, name, Node(stat.S_IFCHR))
        elif earlier.children is not None:  # a new directory in the place of a removed one
            self._make_opaque(earlier)
            self._implied.pop(earlier, None)

    def _linked(self, target: bytes) -> Node:
        """Return the file that a hard link leads to: one of this layer, or a copy of one of those below."""
        missing = f"it is a hard link to {quoted(target)}, which is not in this layer before it"
        parts = _parts(target)
        for _ in range(_MAX_LINKS):
            node, through = self._there(parts)
            if node is None and through is None:
                if self._below is None:
                    raise Incomplete(missing)
                below = self._below.find(parts)
                if below is None:
                    raise BadLayer(f"{missing} or in those below")
                if isinstance(below, File):
                    node = self._copy(below)
                else:
                    through = below
            if node is not None:
                if node.whiteout:
                    raise BadLayer(missing)
                if node.children is not None:
                    raise BadLayer(f"it is a hard link to {quoted(target)}, which is a directory")
                return node
            assert through is not None
            parts = through
        raise BadLayer("there are too many symbolic links in its path")

    def _there(self, parts: list[bytes]) -> tuple[Node | None, list[bytes] | None]:
        """Return what this layer has at a path, or where a symbolic link on its way leads.

        Neither: what the layers below have there is seen. A whiteout: nothing is."""
        node, hidden = self.root, False
        for index, part in enumerate(parts):
            if node.children is None:
                if stat.S_ISLNK(node.mode):
                    assert node.content is not None
                    return None, followed(parts[: index - 1], node.content, parts[index:])
                return Node(stat.S_IFCHR), None
            hidden = hidden or (node.xattrs is not None and OPAQUE in node.xattrs)
            child = node.children.get(part)
            if child is None:
                return (Node(stat.S_IFCHR) if hidden else None), None
            node = child
        return node, None

    def _copy(self, file: File) -> Node:
        """Return a copy of a file of the layers below, the same for all links to it."""
        node = self._copies.get(file.key)
        if node is None:
            node = Node(file.mode, file.uid, file.gid, file.mtime_ns)
            if node.children is not None:
                return node
            self._copies[file.key] = node
            node.size = file.size
            self._check_xattrs(file.xattrs)
            node.xattrs = file.xattrs or None
            if stat.S_ISREG(file.mode):
                self._bytes += file.size
                self._holes += file.size  # how much of it there are is not known
                self._check_sizes()
                self.copied.append((node, file))
            elif stat.S_ISLNK(file.mode):
                self.hold(file.size)
                node.content = b"".join(map(bytes, file.pieces()))
            else:
                node.device = file.place
        return node

    def _check_sizes(self) -> None:
        if self._bytes > self._limits.max_bytes:
            raise BadLayer(f"the layer has over {self._limits.max_bytes} bytes (images.max_layer_bytes)")
        if self._holes > self._limits.hole_bytes:
            raise BadLayer(f"the layer has holes of over {self._limits.hole_bytes} bytes")

    def _parent(self, parts: list[bytes], *, make: bool) -> Node:
        """Return the directory to which a path leads; what is missing of it is made."""
        if self._last is not None and self._last[0] == parts:
            return self._last[1]
        way, names = [self.root], [b""]
        todo, links, steps = parts[::-1], 0, 0
        while todo:
            part = todo.pop()
            steps += 1
            if steps > _MAX_STEPS:
                raise BadLayer("the symbolic links in its path make it too long")
            if part == b"..":  # in a symbolic link's target
                way, names = way[:-1] or way, names[:-1] or names
                continue
            node = _children(way[-1]).get(part)
            if node is not None and stat.S_ISLNK(node.mode):
                assert node.content is not None
                links += 1
                if links > _MAX_LINKS:
                    raise BadLayer("there are too many symbolic links in its path")
                if node.content.startswith(b"/"):
                    way, names = [self.root], [b""]
                todo += [p for p in node.content.split(b"/")[::-1] if p not in (b"", b".")]
                continue
            if node is None or node.whiteout:
                node = self._missing(way[-1], [*names[1:], part], node is not None, make)
            if node.children is None:
                raise BadLayer(f"{quoted(part)} in its path is no directory")
            way.append(node)
            names.append(part)
            if len(way) > self._limits.depth:
                raise BadLayer(f"it is over {self._limits.depth} directories deep")
        self._last = parts, way[-1]
        return way[-1]

    def _missing(self, parent: Node, path: list[bytes], removed: bool, make: bool) -> Node:
        """Make a directory that has no entry so far. :param removed: an entry has removed what was there."""
        if not make:
            raise BadLayer("there is no such directory")
        node, name = _directory(), path[-1]
        if name.startswith(_WHITEOUT):
            raise BadLayer(f"{quoted(name)} in its path is no directory's name")
        if removed:
            self._make_opaque(node)
        else:
            self._implied[node] = path
            self.hold(_OVERHEAD + 8 * len(path))
        self._put(parent, name, node)
        return node

    def walk(self) -> Iterator[Node]:
        """Yield each file once, a directory's together. Counts the links to each on the way."""
        self.root.links = 2
        directories = [self.root]
        yield self.root
        for directory in directories:  # the loop itself appends to it
            for _, child in sorted(_children(directory).items()):
                child.links += 1
                if child.children is not None:
                    child.links += 1
                    directory.links += 1
                    directories.append(child)
                if child.children is not None or child.links == 1:
                    yield child


def _children(node: Node) -> dict[bytes, Node]:
    assert node.children is not None
    return node.children


def _parts(path: bytes) -> list[bytes]:
    parts = [part for part in path.split(b"/") if part not in (b"", b".")]
    if b".." in parts:
        raise BadLayer(f"there is .. in {quoted(path)}; make the image with another program")
    return parts
