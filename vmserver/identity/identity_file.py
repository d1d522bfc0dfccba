# SPDX-License-Identifier: Apache-2.0
"""The identity from files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import LoopingCall
from twisted.logger import Logger

from infranetes_common.concurrency import start
from infranetes_common.errors import InvalidArgument
from infranetes_common.identity import MAX_DOCUMENT_BYTES, Identity, encode
from vmserver.identity import tls
from vmserver.identity.delivery import Accept, answer

POLL_SECONDS = 0.5
_CERTIFICATE_END = "-----END CERTIFICATE-----"

_log = Logger()


class IdentityFile:
    """An `IdentitySource`: a document in a file, read when it appears and whenever it changes."""

    def __init__(self, reactor: IReactorTime, path: Path, accept: Accept) -> None:
        self._path = path
        self._accept = accept
        self._version: tuple[int, ...] | None = None
        self._errno: int | None = 0
        self._loop = LoopingCall(self._poll)
        self._loop.clock = reactor

    def start(self) -> None:
        """Read the file, now or as soon as it is there."""
        self._loop.start(POLL_SECONDS)

    def stop(self) -> None:
        """Stop looking. Idempotent."""
        if self._loop.running:
            self._loop.stop()

    def _poll(self) -> Deferred[None] | None:
        try:
            document, version = self._content()
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != self._errno:
                self._errno = error.errno
                _log.error("{path} can't be read: {words}", path=str(self._path), words=error.strerror)
            return None
        if document is None:
            return None
        self._version = version
        return start(self._take(document))

    def _content(self) -> tuple[bytes | None, tuple[int, ...]]:
        with open(self._path, "rb") as file:
            status = os.fstat(file.fileno())
            version = (status.st_ino, status.st_mtime_ns, status.st_size)
            if version == self._version:
                return None, version
            if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                self._version = version
                _log.error(
                    "{path} has a private key and is readable by others: chmod 0600", path=str(self._path)
                )
                return None, version
            return file.read(MAX_DOCUMENT_BYTES + 1), version

    async def _take(self, document: bytes) -> None:
        line = await answer(document, self._accept)
        _log.info("identity from {path}: {answer}", path=str(self._path), answer=line.decode().strip())


class CertificateFiles(IdentityFile):
    """An `IdentitySource`: a PEM certificate, followed by its CA's, and the key.

    These give the agent its certificate and nothing else: the machine's names and addresses stay as they are.
    """

    def __init__(self, reactor: IReactorTime, certificate: Path, key: Path, accept: Accept) -> None:
        super().__init__(reactor, key, accept)
        self._certificate = certificate

    def _content(self) -> tuple[bytes | None, tuple[int, ...]]:
        key, version = super()._content()
        if key is None:
            return None, version
        leaf, end, chain = self._certificate.read_text(errors="replace").partition(_CERTIFICATE_END)
        certificate = leaf + end + "\n"
        try:
            identity = Identity(
                sandbox_id=tls.sandbox_id_of(certificate),
                certificate_pem=certificate,
                key_pem=key.decode(errors="replace"),
                ca_pem=chain.strip() + "\n",
            )
            return encode(identity), version
        except InvalidArgument as error:
            self._version = version
            _log.error(
                "{path}, {key}: {error}; expected a PEM certificate followed by its CA's, and its key",
                path=str(self._certificate),
                key=str(self._path),
                error=error,
            )
            return None, version
