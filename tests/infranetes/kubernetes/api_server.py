# SPDX-License-Identifier: Apache-2.0
"""A simulated API server: lists, watches and streaming lists of objects of any kind, over HTTP.

It is as strict as Kubernetes' about the parameters of a watch, forgets old versions, and can be made to fail.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from twisted.internet.address import IPv4Address
from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IListeningPort, IReactorSocket, IReactorSSL
from twisted.internet.ssl import CertificateOptions
from twisted.web import server
from twisted.web.http import Request
from twisted.web.resource import Resource

from infranetes_common.reactors import IReactor

Json = dict[str, Any]  # Any: JSON
#: The kinds of the objects at each path, which Kubernetes' own clients require.
KINDS = {
    "/api/v1/services": ("v1", "Service"),
    "/api/v1/nodes": ("v1", "Node"),
    "/apis/discovery.k8s.io/v1/endpointslices": ("discovery.k8s.io/v1", "EndpointSlice"),
    "/apis/networking.k8s.io/v1/servicecidrs": ("networking.k8s.io/v1", "ServiceCIDR"),
}
_POD = re.compile(r"/api/v1/namespaces/[^/]+/pods/[^/]+")
_SINGLE = re.compile(r"/api/v1/namespaces/[^/]+/(configmaps|secrets)/[^/]+")


class SimulatedApiServer(Resource):
    """The server. Call `start`, then use `url`.

    :ivar streaming: whether it supports streaming lists. :ivar status: refuse all requests with it; 0: don't.
    :ivar paging: whether it splits lists from its watch cache into pages, as newer servers do.
    :ivar trickle: how many bytes of a watch are sent at a time; 0: all.
    :ivar absent: paths that it does not have.
    :ivar refused: paths that are forbidden to everyone.
    :ivar pods: single pods, by their full paths. :ivar single: single ConfigMaps and Secrets, likewise.
    :ivar silent: paths whose requests are never answered.
    :ivar written: what was created and changed: the method, the path, and the document.
    :ivar asked: the query of each request, with its path as `path`. :ivar token: required of every request.
    :ivar clients: the names in the certificates of its clients.
    """

    isLeaf = True

    def __init__(self, reactor: IReactor) -> None:
        super().__init__()
        self._reactor = reactor
        self._objects: dict[str, dict[tuple[str, str], Json]] = {}
        self._history: dict[str, list[tuple[int, Json]]] = {}
        self._watchers: dict[Request, str] = {}
        self._version = 1
        self._oldest = 0
        self.streaming = True
        self.paging = True
        self._pages: dict[str, dict[tuple[str, str], Json]] = {}  # the rest of the last list
        self.trickle = 0
        self._late: dict[Request, bytes] = {}
        self.status = 0
        self.absent: set[str] = set()
        self.refused: set[str] = set()
        self.pods: dict[str, Json] = {}
        self.single: dict[str, Json] = {}
        self.silent: set[str] = set()
        self.written: list[tuple[str, str, Json]] = []
        self.token = ""
        self.asked: list[dict[str, str]] = []
        self.clients: list[str] = []
        self.port: IListeningPort | None = None
        self._tls = False

    @property
    def url(self) -> str:
        assert self.port is not None
        address = self.port.getHost()
        assert isinstance(address, IPv4Address)
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{address.port}"

    def kubeconfig(self, path: Path, **user: str) -> Path:
        """Write a kubeconfig, and return its path. :param user: credentials, such as `tokenFile`."""
        path.write_text(
            json.dumps({
                "clusters": [{"name": "c", "cluster": {"server": self.url}}],
                "users": [{"name": "u", "user": user}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "x",
            })
        )  # fmt: skip
        return path

    def start(self, port: int = 0, tls: CertificateOptions | None = None) -> None:
        site: Any = server.Site(self)  # Any: its type is too narrow for listenTCP
        self._tls = tls is not None
        if tls is None:
            self.port = self._reactor.listenTCP(port, site, interface="127.0.0.1")
        else:
            ssl = cast(IReactorSSL, self._reactor)
            self.port = ssl.listenSSL(port, site, tls, interface="127.0.0.1")

    def listen_on(self, listening: socket.socket) -> IListeningPort:
        """Serve on this socket, too, perhaps in another network namespace. The caller must stop the port."""
        site: Any = server.Site(self)  # Any: as above
        sockets = cast(IReactorSocket, self._reactor)
        return sockets.adoptStreamPort(listening.fileno(), listening.family, site)

    def stop(self) -> Deferred[None]:
        """Stop listening and close all connections."""
        self.close_watches(abort=True)
        assert self.port is not None
        return self.port.stopListening() or succeed(None)

    # What users do with objects

    def put(self, path: str, item: Json) -> None:
        """Create or change an object."""
        objects = self._objects.setdefault(path, {})
        name = _name(item)
        self._tell(path, "MODIFIED" if name in objects else "ADDED", item)
        objects[name] = item

    def remove(self, path: str, item: Json) -> None:
        """Delete an object."""
        self._objects[path].pop(_name(item))
        self._tell(path, "DELETED", item)

    def _tell(self, path: str, kind: str, item: Json) -> None:
        self._version += 1
        item["metadata"]["resourceVersion"] = str(self._version)
        item |= _kind(path)
        event = {"type": kind, "object": json.loads(json.dumps(item))}
        self._history.setdefault(path, []).append((self._version, event))
        for request, its in self._watchers.items():
            if its == path:
                self._write(request, event)

    def bookmark(self) -> None:
        """Send a bookmark with the current version to all watches."""
        for request, path in self._watchers.items():
            self._write(request, self._bookmark(path))

    def compact(self) -> None:
        """Forget all versions but the latest."""
        self._version += 1
        self._oldest = self._version
        self._history.clear()

    def forget(self, bumped: bool = False) -> None:
        """Turn into another server, with other objects and lower versions, as after a restore from a backup.

        :param bumped: with higher versions, and without the old ones, as after `etcdutl snapshot restore
            --bump-revision --mark-compacted`. Otherwise versions of the two histories can't be told apart.
        """
        self._objects.clear()
        self._history.clear()
        self._version, self._oldest = (self._version + 1000,) * 2 if bumped else (1, 0)
        self.close_watches()

    def expire(self) -> None:
        """Tell all watches, within the response, that their version is too old."""
        for request in list(self._watchers):
            status = {"kind": "Status", "code": 410, "reason": "Expired", "metadata": {}}
            self._write(request, {"type": "ERROR", "object": status})
        self.close_watches()

    def close_watches(self, abort: bool = False) -> None:
        """End all responses to watches."""
        for request in list(self._watchers):
            if abort:
                request.transport.abortConnection()
            else:
                request.finish()

    def _write(self, request: Request, event: Json) -> None:
        data = json.dumps(event).encode() + b"\n"
        if request in self._late:
            self._late[request] += data
        elif self.trickle:
            self._late[request] = data
            self._drip(request)
        else:
            request.write(data)

    def _drip(self, request: Request) -> None:
        late = self._late.pop(request)
        if request.finished or request._disconnected:
            return
        size = self.trickle or len(late)
        request.write(late[:size])
        if late[size:]:
            self._late[request] = late[size:]
            self._reactor.callLater(0.001, self._drip, request)

    # Requests

    def render_GET(self, request: Request) -> bytes | int:
        path = request.path.decode()
        request.setHeader("content-type", "application/json")
        query = {key.decode(): values[0].decode() for key, values in request.args.items()}
        self.asked.append({**query, "path": path})
        if self._tls and (certificate := request.transport.getPeerCertificate()):
            self.clients.append(certificate.get_subject().CN)
        if self.token and request.getHeader("authorization") != f"Bearer {self.token}":
            return _refusal(request, 401, "Unauthorized")
        if self.status:
            return _refusal(request, self.status, "as it is told to")
        if request.path.decode() in self.absent:
            return _refusal(request, 404, "the server could not find the requested resource")
        if path in self.refused:
            return _refusal(request, 403, "forbidden")
        if path in self.silent:
            request.notifyFinish().addErrback(lambda _: None)
            return server.NOT_DONE_YET
        if _POD.fullmatch(path):
            if path not in self.pods:
                return _refusal(request, 404, f"pods {path.rpartition('/')[2]!r} not found")
            return json.dumps(self.pods[path]).encode()
        if _SINGLE.fullmatch(path):
            if path not in self.single:
                return _refusal(request, 404, "not found")
            return json.dumps(self.single[path]).encode()
        if query.get("watch") not in ("1", "true"):
            return self._list(request, path, query)
        if "sendInitialEvents" in query and not self.streaming:
            return _refusal(request, 422, "sendInitialEvents is forbidden for watch")
        return self._watch(request, path, query)

    def render_POST(self, request: Request) -> bytes:
        return self._write_object(request, "POST", "application/json", 201)

    def render_PATCH(self, request: Request) -> bytes:
        return self._write_object(request, "PATCH", "application/strategic-merge-patch+json", 200)

    def _write_object(self, request: Request, method: str, kind: str, status: int) -> bytes:
        path = request.path.decode()
        if self.token and request.getHeader("authorization") != f"Bearer {self.token}":
            return _refusal(request, 401, "Unauthorized")
        if self.status:
            return _refusal(request, self.status, "as it is told to")
        if path in self.refused:
            return _refusal(request, 403, "forbidden")
        if request.getHeader("content-type") != kind:
            return _refusal(request, 415, "the body of the request was in an unknown format")
        document = json.loads(request.content.read())
        if method == "POST" and (method, path, document) in self.written:
            return _refusal(request, 409, "AlreadyExists")
        self.written.append((method, path, document))
        request.setResponseCode(status)
        return json.dumps(document).encode()

    def _list(self, request: Request, path: str, query: Mapping[str, str]) -> bytes:
        following = query.get("continue", "")
        if following and "resourceVersion" in query:
            return _refusal(request, 400, "specifying resource version is not allowed when using continue")
        version, begin = map(int, following.split(":")) if following else (self._version, 0)
        if version < self._oldest:
            return _refusal(request, 410, "The provided continue parameter is too old")
        limit = int(query.get("limit") or "0") if self.paging or "resourceVersion" not in query else 0
        if not following:
            self._pages = {name: dict(its) for name, its in self._objects.items()}
        items = list(self._pages.get(path, {}).values())
        end = begin + limit if limit else len(items)
        listed = {key: f"{value}List" if key == "kind" else value for key, value in _kind(path).items()}
        about = {"resourceVersion": str(version)}
        if end < len(items):
            about["continue"] = f"{version}:{end}"
        return json.dumps({**listed, "metadata": about, "items": items[begin:end]}).encode()

    def _watch(self, request: Request, path: str, query: Mapping[str, str]) -> bytes | int:
        initial = query.get("sendInitialEvents") == "true"
        if initial and (
            query.get("resourceVersionMatch") != "NotOlderThan" or query.get("allowWatchBookmarks") != "true"
        ):
            return _refusal(request, 422, "sendInitialEvents needs resourceVersionMatch and bookmarks")
        since = int(query.get("resourceVersion") or "0")
        if not initial and since < self._oldest:
            return _refusal(request, 410, "too old resource version")
        if since > self._version:
            return _refusal(request, 504, "Too large resource version")
        if initial:
            for item in self._objects.get(path, {}).values():
                self._write(request, {"type": "ADDED", "object": item})
            self._write(request, self._bookmark(path, {"k8s.io/initial-events-end": "true"}))
        else:
            for version, event in self._history.get(path, ()):
                if version > since:
                    self._write(request, event)
            self._write(request, self._bookmark(path))
        self._watchers[request] = path
        request.notifyFinish().addBoth(lambda _: self._watchers.pop(request))
        return server.NOT_DONE_YET

    def _bookmark(self, path: str, annotations: Mapping[str, str] | None = None) -> Json:
        about = {"resourceVersion": str(self._version), "annotations": annotations or {}}
        return {"type": "BOOKMARK", "object": {**_kind(path), "metadata": about}}


def _kind(path: str) -> dict[str, str]:
    if path not in KINDS:  # no client looks at the kind
        return {}
    version, kind = KINDS[path]
    return {"apiVersion": version, "kind": kind}


def _name(item: Json) -> tuple[str, str]:
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]


def _refusal(request: Request, status: int, why: str) -> bytes:
    request.setResponseCode(status)
    return json.dumps({"kind": "Status", "code": status, "message": why}).encode()
