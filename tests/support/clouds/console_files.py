# SPDX-License-Identifier: Apache-2.0
"""The serial ports of a simulated vCenter's VMs: files of a datastore, which a session may read by HTTPS.

vcsim has the files, empty, so that they can be searched for and deleted. What their VMs have written is
served from here. A file whose VM is on is not deleted, and one in a folder that nobody has made keeps its
VM off.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from http.client import HTTPConnection
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.clouds.http_sites import Answer
from tests.support.clouds.soap import fault
from tests.support.clouds.vcenter_privileges import granted
from tests.support.clouds.vcsim import Vcsim

READ = "ReadFile"  # the action, in faults
_PATH = re.compile(r"<(?:fileName|name)[^>]*>\[(\w+)\] ([\w-]+)/([\w-]+)\.log</")
_PRIVILEGES = {"Datastore.Browse", "Datastore.FileManagement"}


class ConsoleFiles:
    """One test's.

    :param console: returns what a VM has written, by its name. :param is_on: whether a VM is on.
    :ivar there: the names of the VMs that have one. :ivar ranges: those that were read.
    :ivar sessions: the cookies of sessions that are open."""

    def __init__(self, vcsim: Vcsim, console: Callable[[str], str], is_on: Callable[[str], bool]) -> None:
        self._vcsim = vcsim
        self._console = console
        self._is_on = is_on
        self._folders: set[str] = set()
        self.there: dict[str, str] = {}  # the files' paths, by VMs' names
        self.sessions: set[str] = set()
        self.ranges: list[tuple[int, int]] = []

    def folder_made(self, body: str) -> None:
        """Note that a folder was asked for."""
        self._folders.update(re.findall(r"<name[^>]*>\[\w+\] ([\w-]+)</name>", body))

    def refusal(self, action: str, body: str) -> tuple[int, bytes] | None:
        """Return why a request is refused; None: it is not."""
        asked = _PATH.search(body)
        if action == "CloneVM_Task" and asked is not None and asked[2] not in self._folders:
            return 500, fault("FileNotFound", f"<file>{asked[0]}</file>")
        if action == "DeleteDatastoreFile_Task" and asked is not None and self._is_on(asked[3]):
            return 500, fault("FileLocked", f"<file>{asked[0]}</file>")
        return None

    def _thd_made(self, body: str) -> None:
        """Make the file that the serial port of a clone writes to, if it has one."""
        if "VirtualSerialPort" in body and (asked := _PATH.search(body)) is not None:
            datastore, folder, name = asked.groups()
            self.there[name] = f"/folder/{folder}/{name}.log?dcPath=DC0&dsName={datastore}"
            connection = HTTPConnection("127.0.0.1", self._vcsim.port, timeout=10)
            connection.request("PUT", self.there[name], b"")
            assert connection.getresponse().status in (200, 201)
            connection.close()

    def deleted(self, body: str) -> None:
        """Note that a file is deleted."""
        if (asked := _PATH.search(body)) is not None:
            self.there.pop(asked[3], None)

    def answer(self, request: Any) -> Answer:
        """Serve a request for a file."""
        if (request.getHeader("Cookie") or "") not in self.sessions:
            return 401, b""
        if not granted() >= _PRIVILEGES:
            return 403, b""
        parts = urlsplit(unquote(request.uri.decode()))
        name = parts.path.rpartition("/")[2].removesuffix(".log")
        its = urlsplit(self.there.get(name, ""))
        if parts.path != its.path or parse_qs(parts.query) != parse_qs(its.query):
            return 404, b""
        content = self._console(name).encode()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", request.getHeader("Range") or "")
        if asked is None:
            return 200, content
        begin, end = int(asked[1]), int(asked[2])
        self.ranges.append((begin, end))
        if begin >= len(content):
            return 416, b""
        return 206, content[begin : end + 1]
