# SPDX-License-Identifier: Apache-2.0
"""Files of datastores, which a vCenter shows over HTTPS beside its SOAP interface, to its sessions.

Source: vSphere Web Services SDK Programming Guide, "Access to the datastore by HTTP".
"""

from __future__ import annotations

import contextlib
import ssl
from http.client import HTTPSConnection
from pathlib import Path
from urllib.parse import urlsplit

import attrs

from infranetes.providers.cloud.interface import CloudError, ErrorKind
from infranetes.providers.cloud.vsphere.tls import tls_context

_KINDS = {
    401: ErrorKind.CREDENTIALS,
    403: ErrorKind.CREDENTIALS,
    404: ErrorKind.NOT_FOUND,
    429: ErrorKind.THROTTLED,
}
_BEHIND_THE_END = 416


@attrs.frozen
class Part:
    """An answer. :ivar body: as it came."""

    status: int
    body: bytes = attrs.field(repr=False)

    def content(self) -> bytes | None:
        """Return the part of the file; None: it ends before that. :raise CloudError: it is refused."""
        if self.status == _BEHIND_THE_END:
            return None
        if self.status in (200, 206):
            return self.body
        kind = _KINDS.get(self.status, ErrorKind.TRANSIENT)
        needs = " (privileges Datastore.Browse, Datastore.FileManagement)" if self.status == 403 else ""
        raise CloudError(kind, f"a file of a datastore can't be read: status {self.status}{needs}")


class DatastoreFiles:
    """Reads files of one vCenter. Each request has a connection of its own, as those of `rest`."""

    def __init__(self, name: str, port: int, ca_file: Path | None, timeout: float) -> None:
        self._name = name
        self._port = port
        self._ca_file = ca_file
        self._timeout = timeout
        self._tls: ssl.SSLContext | None = None

    def _thd_part(self, url: str, cookie: str, begin: int, size: int) -> Part:
        """Ask for a part of a file. :param cookie: a session's."""
        if self._tls is None:
            self._tls = tls_context(self._ca_file)
        parts = urlsplit(url)
        connection = HTTPSConnection(self._name, self._port, timeout=self._timeout, context=self._tls)
        with contextlib.closing(connection):
            headers = {"Cookie": cookie, "Range": f"bytes={begin}-{begin + size - 1}"}
            connection.request("GET", f"{parts.path}?{parts.query}", headers=headers)
            response = connection.getresponse()
            if response.status == 200 and begin:
                raise CloudError(ErrorKind.UNEXPECTED, "the vCenter, or a proxy before it, sends whole files")
            return Part(response.status, response.read(size))
