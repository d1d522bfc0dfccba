# SPDX-License-Identifier: Apache-2.0
"""The copy of a VM's own layer of its disk. Everything here blocks.

A QEMU that was taken over may have written anything into the layer, also the names of other files. A copy
names none: whoever opens it says what is below it.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from threading import Event

from infranetes.providers.qemu.keep.pipe import as_error
from infranetes.providers.qemu.volumes import sparse_files
from infranetes_common.errors import FailedPrecondition

# Of a qcow2's header (QEMU's docs/interop/qcow2.txt): magic, version, where the backing file's name is and
# how long it is, cluster bits, size, encryption; in version 3 the features without which it can't be read.
_HEADER = struct.Struct(">4sIQIIQI")
_FEATURES_AT, _FEATURES = 72, struct.Struct(">Q")
_NAME_AT, _NAME_BYTES = 8, 12
_MAGIC, _VERSION = b"QFI\xfb", 3


def thd_copy(source: Path, target: Path, stop: Event) -> None:
    """Copy a layer that nobody writes to; blocks are shared where the file system can do that.

    :param stop: ends it. :raise FailedPrecondition: it is no layer as the daemon makes them.
    :raise InfranetesError: it can't be read or written."""
    try:
        old = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            new = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                if not sparse_files.clone(old, new):
                    sparse_files.copy(old, new, stop)
                _name_no_file(new)
            finally:
                os.close(new)
        finally:
            os.close(old)
    except OSError as error:
        raise as_error(error, f"the disk of a VM can't be copied to {target}") from None


def _name_no_file(descriptor: int) -> None:
    header = os.pread(descriptor, _FEATURES_AT + _FEATURES.size, 0).ljust(_FEATURES_AT + _FEATURES.size)
    magic, version, _, _, _, _, encryption = _HEADER.unpack_from(header)
    (features,) = _FEATURES.unpack_from(header, _FEATURES_AT)
    if (magic, version) != (_MAGIC, _VERSION) or encryption or features:
        raise FailedPrecondition(
            "the disk of a VM is not as it was made: its QEMU has changed what no guest can change, and may "
            "have been taken over"
        )
    os.pwrite(descriptor, bytes(_NAME_BYTES), _NAME_AT)
