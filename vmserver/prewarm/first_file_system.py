# SPDX-License-Identifier: Apache-2.0
"""The first file system, which takes longer than all later ones, made before a pod has a blank volume.

Its program is read from the machine's disk, and where the processor is emulated, translated.
"""

from __future__ import annotations

import tempfile

from twisted.logger import Logger

from infranetes_common.reactors import IReactor
from vmserver.volumes import filesystems

_SIZE = 16 << 20  # the file's size; it is sparse, and little is written

_log = Logger()


async def make_first_file_system(reactor: IReactor) -> None:
    """Make one in a file, which is removed again. A failure is only logged."""
    begun = reactor.seconds()
    try:
        with tempfile.NamedTemporaryFile(prefix="prewarm-", dir="/dev/shm") as file:
            file.truncate(_SIZE)
            await filesystems.make(reactor, file.name, "ext4")
        _log.info("the first file system is made, in {seconds:.1f} s", seconds=reactor.seconds() - begun)
    except Exception as error:
        _log.warn(
            "the first file system could not be made: {kind}: {error}", kind=type(error).__name__, error=error
        )
