# SPDX-License-Identifier: Apache-2.0
"""A layer of an image as a disk: an uncompressed erofs file system, made once on the node."""

from __future__ import annotations

from pathlib import Path

import attrs

from infranetes_common.errors import FailedPrecondition


@attrs.frozen
class LayerDisk:
    """The file. Equal diff ids mean equal bytes, for as long as FORMAT in `disks` is the same.

    If the layer has hard links to files of the layers below, or files in directories that it does not
    describe, its bytes depend on these too.

    :ivar diff_id: sha256: and 64 hex digits of the layer's uncompressed tar.
    :ivar size: bytes.
    :ivar digest: sha256: and 64 hex digits of the file itself.
    """

    diff_id: str
    path: Path
    size: int
    digest: str


class NeedsBelow(FailedPrecondition):
    """The layer can become a disk only together with the layers below: it takes from them what it lacks."""
