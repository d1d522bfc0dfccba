# SPDX-License-Identifier: Apache-2.0
"""Cloud Storage's JSON API over HTTP: one bucket, and resumable uploads.

Source: Cloud Storage, "Perform resumable uploads", and "JSON API v1". The sessions' protocol is checked as
Google does: parts follow each other, and all but the last one are multiples of 256 KiB.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
from typing import Any
from urllib.parse import unquote

import attrs

from tests.support.clouds import discovery
from tests.support.clouds.faults import FaultKind
from tests.support.clouds.gce import SimulatedGce
from tests.support.clouds.gce_requests import bearer
from tests.support.clouds.http_sites import Answer, Answering, ClosableSite

BUCKET = "images-of-the-test"
_BEGIN = re.compile(r"/upload/storage/v1/b/([^/]+)/o")
_OBJECT = re.compile(r"/storage/v1/b/([^/]+)/o/([^/]+)")
_SESSION = re.compile(r"/session/([0-9a-f]+)")
_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+)")
_UNIT = 256 * 1024


@attrs.define
class Session:
    """An upload. :ivar kept: what has arrived for good."""

    name: str
    kept: bytes = b""


class SimulatedStorage:
    """One test's bucket.

    :param world: the cloud that issues tokens, and whose faults are this service's too.
    :ivar objects: the content of objects. :ivar sessions: uploads that are under way.
    :ivar requests: all requests, in order. :ivar keeps: the most that is kept of the next part.
    """

    def __init__(self, reactor: Any, world: SimulatedGce) -> None:
        self._reactor, self._world = reactor, world
        self.objects: dict[str, bytes] = {}
        self.sessions: dict[str, Session] = {}
        self.requests: list[str] = []
        self.keeps: list[int] = []
        self._site = ClosableSite(Answering(self._answer, "application/json"))

    def start(self) -> None:
        """Start to serve, imports of images too."""
        self._port = self._reactor.listenTCP(0, self._site, interface="127.0.0.1")
        self.endpoint = f"http://127.0.0.1:{self._port.getHost().port}"
        self._world.api.importing.archive = lambda bucket, name: (
            self.objects.get(name) if bucket == BUCKET else None
        )

    async def stop(self) -> None:
        """Stop."""
        await self._port.stopListening()
        await self._site.close_connections()

    async def _answer(self, request: Any) -> Answer:
        path, method = request.path.decode(), request.method.decode()
        content = request.content.read()
        name = {"POST": "begin", "PUT": "part", "GET": "find", "DELETE": "delete object"}[method]
        if method == "PUT" and not content:
            name = "ask"
        self.requests.append(name)
        fault = self._world.faults.befalling({"Action": name})
        kind = fault.kind if fault is not None else None
        if kind is FaultKind.ERROR:
            return _refused(503, "Backend Error")
        if bearer(request) not in self._world.storage_tokens:
            return _refused(401, "Invalid Credentials")
        answer = self._served(method, path, request, content)
        if kind is FaultKind.LOST:
            raise ConnectionError
        return answer

    def _served(self, method: str, path: str, request: Any, content: bytes) -> Answer:
        if (begun := _BEGIN.fullmatch(path)) and method == "POST":
            if begun[1] != BUCKET:
                return _refused(404, "The specified bucket does not exist.")
            id = secrets.token_hex(8)
            self._judge("POST", f"b/{begun[1]}/o", request, json.loads(content), {})
            self.sessions[id] = Session(request.args[b"name"][0].decode())
            return 200, b"", ("Location", f"{self.endpoint}/session/{id}")
        if (found := _SESSION.fullmatch(path)) and method == "PUT":
            if found[1] not in self.sessions:
                return _refused(410, "The session has expired")
            return self._part(found[1], request.getHeader("Content-Range"), content)
        if named := _OBJECT.fullmatch(path):
            self._judge("GET", f"b/{named[1]}/o/{named[2]}", request, {}, {})
            return self._object(method, named[1], unquote(named[2]))
        return _refused(400, "Bad Request")

    def _judge(self, method: str, path: str, request: Any, body: Any, answer: Any) -> None:
        """Check a request like this one by Google's description of the API."""
        query = {key.decode(): values[0].decode() for key, values in request.args.items()}
        self._world.malformed += discovery.storage().wrong(method, path, query, body, answer)

    def _part(self, id: str, asked: str, content: bytes) -> Answer:
        session, parsed = self.sessions[id], _RANGE.fullmatch(asked)
        if parsed is None:
            return _refused(400, "Failed to parse Content-Range header.")
        total = int(parsed[3])
        if parsed[1] is not None:
            begin, end = int(parsed[1]), int(parsed[2]) + 1
            if (
                begin != len(session.kept)
                or end - begin != len(content)
                or (end < total and len(content) % _UNIT)
            ):
                return _refused(400, "Invalid request.")
            session.kept += content[: self.keeps.pop(0)] if self.keeps else content
        if len(session.kept) == total:
            self.objects[session.name] = session.kept
            return 200, self._described(session.name)
        shown = [("Range", f"bytes=0-{len(session.kept) - 1}")] if session.kept else []
        return (308, b"", *shown)

    def _object(self, method: str, bucket: str, name: str) -> Answer:
        if bucket != BUCKET:
            return _refused(404, "The specified bucket does not exist.")
        if name not in self.objects:
            return _refused(404, f"No such object: {bucket}/{name}")
        if method == "DELETE":
            del self.objects[name]
            return 204, b""
        return 200, self._described(name)

    def _described(self, name: str) -> bytes:
        content = self.objects[name]
        md5 = base64.b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode()
        return json.dumps({"name": name, "size": str(len(content)), "md5Hash": md5}).encode()


def _refused(status: int, message: str) -> Answer:
    return status, json.dumps({"error": {"code": status, "message": message}}).encode()
