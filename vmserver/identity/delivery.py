# SPDX-License-Identifier: Apache-2.0
"""The contract of the sources of identity documents.

A source (virtio-serial, a file, a cloud's metadata) finds documents and hands each to an `Accept`, until the
agent stops: a renewed document arrives the same way.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from twisted.logger import Logger

from infranetes_common.concurrency import replace_file
from infranetes_common.errors import FailedPrecondition, InfranetesError, InvalidArgument
from infranetes_common.identity import MAX_DOCUMENT_BYTES

Accept = Callable[[bytes], Awaitable[int]]
"""Take an identity document on; the result is the TCP port that the agent then listens on.

0: it is called by its virtio-serial port."""

POLL_SECONDS = 1.0  # between two attempts while the machine has no identity
_MAX_WORDS = 500

_log = Logger()


class IdentitySource(Protocol):
    """A source of identity documents."""

    def start(self) -> None:
        """Start to look for documents."""

    def stop(self) -> None:
        """Stop looking. Idempotent."""


async def answer(document: bytes | None, accept: Accept) -> bytes:
    """Offer a document to `accept` and return the line that tells the node how that went.

    :param document: None for one that was too long.
    """
    try:
        if document is None:
            raise InvalidArgument(f"the identity document is over {MAX_DOCUMENT_BYTES} bytes")
        return b"ready %d\n" % await accept(document)
    except InfranetesError as error:
        words = str(error)
    except Exception as error:
        # Omit the error's text: it might quote the document, which holds a private key.
        _log.failure("applying an identity failed")
        words = f"unexpected {type(error).__name__}; the agent's log has the details"
    _log.error("the identity was refused: {words}", words=words)
    return b"failed " + words.replace("\n", " ").encode()[:_MAX_WORDS] + b"\n"


def save(path: Path, text: str) -> None:
    """Write `text` to `path` with mode 0600, whole or not at all.

    :raise FailedPrecondition: it can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(path, text, durable=False)  # a reboot empties the run directory anyway
    except OSError as error:
        raise FailedPrecondition(f"{path} can't be written: {error.strerror}; see run_dir") from error
