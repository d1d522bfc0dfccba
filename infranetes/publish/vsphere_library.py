# SPDX-License-Identifier: Apache-2.0
"""Putting items into a vCenter's content library (source: vSphere Automation API, `content.library.item`)."""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import Callable
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, urlsplit

import attrs

from infranetes.providers.cloud.interface import CloudError, ErrorKind
from infranetes.providers.cloud.vsphere.library import Library
from infranetes.providers.cloud.vsphere.rest import Rest, malformed_answer
from infranetes.providers.cloud.vsphere.session import PORT
from infranetes.providers.cloud.vsphere.tls import tls_context
from infranetes.publish.interface import Report
from infranetes.publish.progress import UploadProgress

_ITEM = "/rest/com/vmware/content/library/item"
_UPDATE = f"{_ITEM}/update-session"
_PART = 1 << 20
_WAIT_SECONDS = 1800.0


@attrs.frozen
class StoredItem:
    """An item of the library. :ivar files: their names; none until it has its content."""

    id: str
    name: str
    description: str
    created: str  # ISO 8601
    files: tuple[str, ...] = ()


class Shelf:
    """One library, as its publisher sees it.

    :param host: the vCenter, as in the configuration. :param timeout: of one answer, in seconds."""

    def __init__(
        self,
        rest: Rest,
        host: str,
        ca_file: Path | None,
        name: str,
        timeout: float = 120.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rest = rest
        self._host, _, port = host.partition(":")
        self._port = int(port or PORT)
        self._ca_file = ca_file
        self._timeout, self._sleep = timeout, sleep
        self.id = Library(rest)._thd_find(name)

    def items(self) -> list[StoredItem]:
        """Return all items."""
        ids = self._rest._thd_request("GET", f"{_ITEM}?library_id={quote(self.id)}")
        return [self._item(str(id)) for id in _list(ids)]

    def named(self, name: str) -> list[StoredItem]:
        """Return the items of a name."""
        spec = {"spec": {"library_id": self.id, "name": name}}
        ids = _list(self._rest._thd_request("POST", f"{_ITEM}?~action=find", spec))
        return [each for each in map(self._item, map(str, ids)) if each.name == name]

    def _item(self, id: str) -> StoredItem:
        match self._rest._thd_request("GET", f"{_ITEM}/id:{quote(id)}"):
            case {"name": str(name), **rest}:
                files = _list(self._rest._thd_request("GET", f"{_ITEM}/file?library_item_id={quote(id)}"))
                names = tuple(str(each.get("name")) for each in files if isinstance(each, dict))
                described, created = str(rest.get("description") or ""), str(rest.get("creation_time") or "")
                return StoredItem(id, name, described, created, names)
        raise malformed_answer()

    def create(self, name: str, description: str) -> str:
        """Make an item without content; return its id."""
        spec = {"library_id": self.id, "name": name, "type": "ovf", "description": description}
        return str(self._rest._thd_request("POST", _ITEM, {"create_spec": spec}))

    def delete(self, id: str) -> None:
        """Delete an item. Idempotent."""
        try:
            self._rest._thd_request("DELETE", f"{_ITEM}/id:{quote(id)}")
        except CloudError as error:
            if error.kind is not ErrorKind.NOT_FOUND:
                raise

    # ---- Content

    def fill(self, id: str, envelope: tuple[str, bytes], disk: tuple[str, Path], report: Report) -> None:
        """Give an item its content. What an earlier run has begun is cancelled: the library takes a file
        from its beginning only."""
        self._cancel_earlier(id)
        session = str(self._rest._thd_request("POST", _UPDATE, {"create_spec": {"library_item_id": id}}))
        name, content = envelope
        self._put(self._endpoint(session, name, len(content)), content)
        name, path = disk
        size = path.stat().st_size
        progress = UploadProgress(f"upload of {name}", size, report)
        with path.open("rb") as file:
            self._put(self._endpoint(session, name, size), _Reading(file, size, progress))
        self._rest._thd_request("POST", f"{_UPDATE}/id:{quote(session)}?~action=complete")
        self._wait_done(session)
        self._rest._thd_request("DELETE", f"{_UPDATE}/id:{quote(session)}")

    def _cancel_earlier(self, id: str) -> None:
        sessions = _list(self._rest._thd_request("GET", f"{_UPDATE}?library_item_id={quote(id)}"))
        for session in map(str, sessions):
            path = f"{_UPDATE}/id:{quote(session)}"
            match self._rest._thd_request("GET", path):
                case {"library_item_id": str(item), "state": state} if item == id:
                    if state == "ACTIVE":
                        self._rest._thd_request("POST", f"{path}?~action=cancel")
                    self._rest._thd_request("DELETE", path)

    def _endpoint(self, session: str, name: str, size: int) -> str:
        spec = {"file_spec": {"name": name, "source_type": "PUSH", "size": size}}
        path = f"{_ITEM}/updatesession/file/id:{quote(session)}?~action=add"
        match self._rest._thd_request("POST", path, spec):
            case {"upload_endpoint": {"uri": str(uri)}}:
                parts = urlsplit(uri)
                return parts.path + (f"?{parts.query}" if parts.query else "")
        raise malformed_answer()

    def _put(self, path: str, body: bytes | _Reading) -> None:
        """Send a file to the vCenter of the configuration, whatever host its answer names."""
        context: ssl.SSLContext = tls_context(self._ca_file)
        connection = HTTPSConnection(self._host, self._port, timeout=self._timeout, context=context)
        with contextlib.closing(connection):
            headers = {
                "Content-Type": "application/octet-stream",
                "Content-Length": str(len(body)),
                "vmware-api-session-id": self._rest.token(),
            }
            try:
                connection.request("PUT", path, body, headers)
                status = connection.getresponse().status
            except (OSError, HTTPException) as error:
                raise CloudError(ErrorKind.TRANSIENT, f"the upload broke off: {error}") from error
        if status >= 300:
            raise CloudError(ErrorKind.TRANSIENT, f"vCenter does not accept the file: {status}")

    def _wait_done(self, session: str) -> None:
        until = time.monotonic() + _WAIT_SECONDS
        while time.monotonic() < until:
            match self._rest._thd_request("GET", f"{_UPDATE}/id:{quote(session)}"):
                case {"state": "DONE"}:
                    return
                case {"state": "ERROR" | "CANCELED", **rest}:
                    words = str(rest.get("error_message") or "vCenter gives no reason")[:400]
                    raise CloudError(ErrorKind.INVALID, f"the library refuses the item: {words}")
            self._sleep(2.0)
        raise CloudError(ErrorKind.TRANSIENT, "the library has not accepted the item in time")


class _Reading:
    """A file that tells how much of it was read."""

    def __init__(self, file: BinaryIO, size: int, progress: UploadProgress) -> None:
        self._file, self._size, self._progress = file, size, progress

    def __len__(self) -> int:
        return self._size

    def read(self, most: int = _PART) -> bytes:
        data = self._file.read(max(most, _PART))
        self._progress.add(len(data))
        return data


def _list(value: object) -> list[object]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise malformed_answer()
    return value
