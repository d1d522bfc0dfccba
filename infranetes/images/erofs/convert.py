# SPDX-License-Identifier: Apache-2.0
"""The conversion of a layer's tar to an erofs image. The same tar gives the same bytes on every machine."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from infranetes.images.erofs import source, tar
from infranetes.images.erofs.below import Below
from infranetes.images.erofs.limits import BAD, FAILED, FULL, INCOMPLETE, BadLayer, Incomplete, Limits
from infranetes.images.erofs.source import TarStream
from infranetes.images.erofs.tree import Tree
from infranetes.images.erofs.writer import Writer


def convert(
    layer: int, image: int, compression: str, diff_id: str, limits: Limits, below: Sequence[int] | None = None
) -> None:
    """Read a layer from one descriptor and write its image to another, an empty file.

    :param compression: gzip, zstd or nothing.
    :param diff_id: the digest that the uncompressed tar has to have.
    :param below: the images of the layers below, lowest first; None: they are not known.
    :raise Incomplete: these are needed.
    :raise BadLayer: the layer can't be used. :raise OSError: it can't be read or the image can't be written.
    """
    tree = Tree(limits, None if below is None else Below(below))
    writer = Writer(image, tree)
    with TarStream(source.chunks(layer, compression), limits.max_bytes) as stream:
        for entry in tar.entries(stream, limits):
            node = tree.add(entry)
            if node is not None:
                writer.store(node, entry.content(stream))
            while tree.copied:
                node, file = tree.copied.pop()
                writer.store(node, file.pieces())
        digest = stream.finish()
    tree.complete()
    if digest != diff_id:
        raise BadLayer(f"it unpacks to a tar with the digest {digest}; pull it again")
    writer.finish(bytes.fromhex(diff_id.partition(":")[2])[:16])


def work(
    layer: int, image: int, compression: str, diff_id: str, limits: Limits, below: Sequence[int] | None
) -> tuple[int, str]:
    """Convert, and tell how that went: an exit code (`limits`) and words, none if it went well."""
    try:
        convert(layer, image, compression, diff_id, limits, below)
    except Incomplete as e:
        return INCOMPLETE, str(e)
    except BadLayer as e:
        return BAD, str(e)
    except MemoryError:
        return BAD, f"it needs more than {limits.memory_bytes} bytes of memory"
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        return (FULL if full else FAILED), os.strerror(e.errno or 0)
    except Exception as e:  # a fault of this program: its traceback would show nothing of the cause
        return FAILED, f"unexpected {type(e).__name__}: {e}"
    return 0, ""
