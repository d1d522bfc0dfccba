# SPDX-License-Identifier: Apache-2.0
"""The chunks of a file, read in threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from infranetes_common.concurrency import IMAGES, run_in_thread
from infranetes_common.errors import FailedPrecondition
from infranetes_common.reactors import IReactor

CHUNK_BYTES = 256 * 1024


class FileChunks:
    """An asynchronous iterator over a file, from an offset on. One chunk is in memory at a time.

    It is not a generator, because a call that ends closes it even while a chunk is being read.

    :param count: called with the size of each chunk when the next one is asked for.
    :raise FailedPrecondition: during iteration: the file can't be read.
    """

    def __init__(self, reactor: IReactor, path: Path, offset: int, count: Callable[[int], None]) -> None:
        self._reactor = reactor
        self._path = path
        self._offset = offset
        self._count = count
        self._file: BinaryIO | None = None
        self._last = 0  # the size of the last chunk
        self._reading = False
        self._closed = False

    def __aiter__(self) -> FileChunks:
        return self

    async def __anext__(self) -> bytes:
        self._count(self._last)
        self._last = 0
        if self._closed:
            raise StopAsyncIteration
        self._reading = True
        try:
            chunk = await run_in_thread(self._reactor, self._thd_read, purpose=IMAGES)
        except OSError as error:
            raise FailedPrecondition(
                f"layer {self._path} can't be read: {error.strerror}; pull the image again"
            ) from None
        finally:
            self._reading = False
            self._let_go()
        if not chunk:
            raise StopAsyncIteration
        self._last = len(chunk)
        return chunk

    async def aclose(self) -> None:
        """Close the file, once a read that is under way has finished. Idempotent."""
        self._closed = True
        self._let_go()

    def _let_go(self) -> None:
        if self._closed and not self._reading and self._file is not None:
            self._file.close()

    def _thd_read(self) -> bytes:
        if self._file is None:
            self._file = open(self._path, "rb", buffering=0)  # noqa: SIM115
            self._file.seek(self._offset)
        return self._file.read(CHUNK_BYTES) or b""
