# SPDX-License-Identifier: Apache-2.0
"""libcloud's OpenStack driver, with what it lacks or gets wrong.

- Its connections get tokens of their own, and find endpoints by the names that DevStack gives to services:
  see `credentials`. Before 3.5 they connect anew for each request.
- `create_node` knows neither tags nor volumes' types, and takes a list of libcloud's objects where Nova takes
  names; `list_nodes` takes no filter and so returns the whole project; `ex_list_floating_ips` and
  `list_images` neither. `list_sizes` reads no extra specs. Here these requests are made as the API has them.
- `ex_create_floating_ip` can't say whose an address is, nor which port it is for.
- `create_volume` takes no metadata and no volume as a source, and `create_volume_snapshot` no metadata;
  `list_volumes` and `ex_list_snapshots` take no filter. `detach_volume` trusts a description of the volume
  that may be old. Enlarging, limits, messages and attachments are not there at all. `attach_volume`,
  `destroy_volume` and `destroy_volume_snapshot` are used as they are.
- It uses Cinder's second API wherever the third one has no catalog entry with DevStack's name, and says no
  version of the API.
- Errors of Neutron and Glance are not understood, and an error without a body is an `AttributeError`.

libcloud is untyped; from here on resources have the types of `libcloud_types`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias
from urllib.parse import urlencode

from libcloud.common.exceptions import BaseHTTPError
from libcloud.common.openstack import OpenStackBaseConnection, OpenStackResponse
from libcloud.compute.base import Node, StorageVolume, VolumeSnapshot
from libcloud.compute.drivers.openstack import OpenStack_2_NodeDriver
from libcloud.compute.types import NodeState

from infranetes.providers.cloud.calls.connections import close_sockets
from infranetes.providers.cloud.interface import CloudError, ErrorKind
from infranetes.providers.cloud.openstack.connections import Trusting, words_of
from infranetes.providers.cloud.openstack.credentials import VOLUME, Credentials, KeystoneSession
from infranetes.providers.cloud.openstack.errors import MICROVERSION, VOLUME_MICROVERSION
from infranetes.providers.cloud.openstack.libcloud_types import (
    Attachment,
    Flavor,
    FloatingAddress,
    Image,
    Named,
    Server,
    Snapshot,
    Subnet,
    Volume,
)
from infranetes_common.errors import FailedPrecondition

_CONSOLE_LINES = 50
_MAX_PAGES = 1000
_VERSIONS = {"compute": f"compute {MICROVERSION}", VOLUME: f"volume {VOLUME_MICROVERSION}"}

_Json: TypeAlias = Any
"""OpenStack's answer, before the caller gives it the type of its resource."""


class Answer(OpenStackResponse):  # type: ignore[misc]
    """Finds the words in errors."""

    def parse_error(self) -> str:
        return f"{self.status} {words_of(self.body) or self.error or ''}".rstrip()


class Connection(Trusting, OpenStackBaseConnection):  # type: ignore[misc]
    """Sends requests to one service, with the token that all threads share."""

    responseCls = Answer
    accept_format = "application/json"
    default_content_type = "application/json"
    service_type = ""
    _session: KeystoneSession  # with which the last request was sent

    # Any: libcloud's base class takes them
    def __init__(self, *args: Any, credentials: Credentials, **options: Any) -> None:
        self._credentials = credentials
        self._endpoint = ""
        super().__init__(*args, ex_force_auth_url="http://unused", **options)

    def encode_data(self, data: object) -> str:
        return json.dumps(data)

    def morph_action_hook(self, action: str) -> str:
        """Switch to the service's current endpoint. libcloud calls this first for each request."""
        session = self._session = self._credentials.session
        self.auth_token, self.ca_file = session.token, session.ca_file
        endpoint = session.endpoints.get(self.service_type)
        if endpoint is None:
            raise FailedPrecondition(
                "Keystone's catalog has no service volumev3 or block-storage in this region: without Cinder "
                "there are no volumes"
            )
        if endpoint != self._endpoint:
            self.host, self.port, self.secure, self.request_path = self._tuple_from_url(endpoint)
            self.connect()
            self._endpoint = endpoint
        return f"{self.request_path}{action}"

    def add_default_headers(self, headers: dict[str, str]) -> dict[str, str]:
        headers = {**headers, "X-Auth-Token": self.auth_token, "Accept": self.accept_format}
        if self.service_type in _VERSIONS:
            headers["OpenStack-API-Version"] = _VERSIONS[self.service_type]
        return headers

    def request(self, *args: Any, **options: Any) -> Any:  # Any: libcloud's base class takes and returns them
        try:
            return self._request(*args, **options)
        except BaseHTTPError as error:
            if int(error.code) != 401:
                raise
            self._credentials._thd_forget(self._session)
        return self._request(*args, **options)  # nothing was done: once more, with a new token

    def _request(self, action: str, method: str = "GET", data: object = "") -> Any:  # Any: as above
        headers = {"Content-Type": self.default_content_type} if data else {}
        return super(OpenStackBaseConnection, self).request(action, data=data, method=method, headers=headers)


class ComputeConnection(Connection):
    """A connection to Nova."""

    service_type = "compute"


class NetworkConnection(Connection):
    """A connection to Neutron."""

    service_type = "network"


class ImageConnection(Connection):
    """A connection to Glance."""

    service_type = "image"


class VolumeConnection(Connection):
    """A connection to Cinder."""

    service_type = VOLUME


class Driver(OpenStack_2_NodeDriver):  # type: ignore[misc]
    """The driver of one thread."""

    connectionCls = ComputeConnection
    network_connectionCls = NetworkConnection
    image_connectionCls = ImageConnection
    volumev3_connectionCls = VolumeConnection
    # libcloud makes these connections too; nothing is sent over them.
    volumev2_connectionCls = reservation_connectionCls = Connection
    connection: ComputeConnection
    volumev3_connection: VolumeConnection
    network_connection: NetworkConnection
    image_connection: ImageConnection

    def __init__(self, credentials: Credentials, timeout: float) -> None:
        self._credentials = credentials
        super().__init__("-", "-", timeout=timeout)

    def _ex_connection_class_kwargs(self) -> dict[str, object]:
        return {"credentials": self._credentials}

    @property
    def project(self) -> str:
        """The id of the project that the token is for."""
        return self._credentials.session.project

    def close(self) -> None:
        """Close the sockets that are kept open; libcloud has no call for that."""
        for each in (self.connection, self.network_connection, self.image_connection):
            close_sockets(each)

    # ---- Nova

    def server(self, id: str) -> Server | None:
        """Return a server, if it exists."""
        found = _unless_missing(self.connection, f"/servers/{id}")
        server: Server | None = None if found is None else found["server"]
        return server

    def servers(self, **filters: str) -> list[Server]:
        """Return the project's servers that match filters of Nova's."""
        return list(self._pages("/servers/detail", "servers", filters))

    def create_server(self, body: Mapping[str, object]) -> str:
        """Ask for a server. Returns its id."""
        return str(self.connection.request("/servers", method="POST", data=body).object["server"]["id"])

    def delete_server(self, id: str) -> None:
        """Ask for a server's end. :raise BaseHTTPError: 404: there is none."""
        self.connection.request(f"/servers/{id}", method="DELETE")

    def console_output(self, id: str) -> str:
        """Return the end of a server's output to its serial port."""
        node = Node(id, id, NodeState.UNKNOWN, [], [], self)
        return str(self.ex_get_console_output(node, _CONSOLE_LINES).get("output") or "").strip()

    def console_log(self, id: str) -> str:
        """Return what Nova has of a server's output to its serial port."""
        node = Node(id, id, NodeState.UNKNOWN, [], [], self)
        return str(self.ex_get_console_output(node).get("output") or "")

    def stop_server(self, id: str) -> None:
        """Have a server's guest power off, which Nova ends after a minute. libcloud's answer hides errors."""
        self.connection.request(f"/servers/{id}/action", method="POST", data={"os-stop": None})

    def start_server(self, id: str) -> None:
        """Start a server that is off. libcloud's answer hides errors."""
        self.connection.request(f"/servers/{id}/action", method="POST", data={"os-start": None})

    def set_metadata(self, id: str, items: Mapping[str, str]) -> None:
        """Set some of a server's metadata. libcloud replaces all of it."""
        self.connection.request(f"/servers/{id}/metadata", method="POST", data={"metadata": items})

    def flavors(self) -> list[Flavor]:
        """Return the flavors that the project may use."""
        return list(self._pages("/flavors/detail", "flavors", {}))

    def zones(self) -> list[str]:
        """Return the names of the availability zones that take servers."""
        found = self.connection.request("/os-availability-zone").object["availabilityZoneInfo"]
        return [each["zoneName"] for each in found if each["zoneState"]["available"]]

    def _pages(
        self, path: str, key: str, filters: Mapping[str, str], connection: Connection | None = None
    ) -> Iterator[_Json]:
        query = dict(filters)
        for _ in range(_MAX_PAGES):
            page = (connection or self.connection).request(_with(path, query)).object
            yield from page[key]
            if not page[key] or not page.get(f"{key}_links"):
                return
            query["marker"] = page[key][-1]["id"]
        raise CloudError(ErrorKind.UNEXPECTED, f"the list {path} does not end")

    def attach(self, server: str, volume: str) -> None:
        """Ask for a volume to be given to a server, whose end it outlives."""
        node = Node(server, server, NodeState.UNKNOWN, [], [], self)
        self.attach_volume(node, StorageVolume(volume, volume, 0, self))

    def detach(self, server: str, volume: str) -> None:
        """Ask for a volume to be taken from a server. Idempotent."""
        _unless_missing(self.connection, f"/servers/{server}/os-volume_attachments/{volume}", "DELETE")

    # ---- Cinder

    def _get_volume_connection(self) -> VolumeConnection:
        return self.volumev3_connection

    def volume(self, id: str) -> Volume | None:
        """Return a volume, if it exists."""
        found = _unless_missing(self.volumev3_connection, f"/volumes/{id}")
        return None if found is None else found["volume"]

    def volumes(self, **filters: str) -> list[Volume]:
        """Return the project's volumes that match filters of Cinder's."""
        return list(self._pages("/volumes/detail", "volumes", filters, self.volumev3_connection))

    def make_volume(self, body: Mapping[str, object]) -> Volume:
        """Ask for a volume."""
        made: Volume = self._cinder("/volumes", {"volume": body})["volume"]
        return made

    def delete_volume(self, id: str) -> None:
        """Ask for a volume's end."""
        self.destroy_volume(StorageVolume(id, id, 0, self))

    def grow_volume(self, id: str, gib: int) -> None:
        """Ask for a larger volume."""
        self._cinder(f"/volumes/{id}/action", {"os-extend": {"new_size": gib}})

    def attachments(self, volume: str) -> list[Attachment]:
        """Return a volume's attachments in all states, without the secrets that their details have."""
        path = _with("/attachments", {"volume_id": volume})
        found: list[Attachment] = self.volumev3_connection.request(path).object["attachments"]
        return found

    def messages(self, resource: str) -> list[str]:
        """Return what Cinder tells users of a volume's or snapshot's failures, the latest first."""
        path = _with("/messages", {"resource_uuid": resource, "sort": "created_at:desc"})
        return [each["user_message"] for each in self.volumev3_connection.request(path).object["messages"]]

    def volume_limits(self) -> Mapping[str, int]:
        """Return the project's limits, and what is used of them."""
        found: Mapping[str, int] = self.volumev3_connection.request("/limits").object["limits"]["absolute"]
        return found

    def snapshot(self, id: str) -> Snapshot | None:
        """Return a snapshot, if it exists."""
        found = _unless_missing(self.volumev3_connection, f"/snapshots/{id}")
        return None if found is None else found["snapshot"]

    def snapshots(self, **filters: str) -> list[Snapshot]:
        """Return the project's snapshots that match filters of Cinder's."""
        return list(self._pages("/snapshots/detail", "snapshots", filters, self.volumev3_connection))

    def make_snapshot(self, body: Mapping[str, object]) -> None:
        """Ask for a snapshot."""
        self._cinder("/snapshots", {"snapshot": body})

    def delete_snapshot(self, id: str) -> None:
        """Ask for a snapshot's end."""
        self.destroy_volume_snapshot(VolumeSnapshot(id, self))

    def _cinder(self, path: str, body: Mapping[str, object]) -> _Json:
        return self.volumev3_connection.request(path, method="POST", data=body).object

    # ---- Glance

    def image(self, id: str) -> Image | None:
        """Return an image, if it exists."""
        image: Image | None = _unless_missing(self.image_connection, f"/v2/images/{id}")
        return image

    def images(self, filters: Mapping[str, str]) -> list[Image]:
        """Return the active images that match filters, the newest first."""
        query = {**filters, "status": "active", "sort": "created_at:desc"}
        images: list[Image] = self.image_connection.request(_with("/v2/images", query)).object["images"]
        return images

    # ---- Neutron

    def networks(self, **filters: str) -> list[Named]:
        """Return the networks that match filters of Neutron's."""
        networks: list[Named] = self._neutron("GET", "networks", filters)["networks"]
        return networks

    def subnets(self, **filters: str) -> list[Subnet]:
        """Return the subnets that match filters of Neutron's."""
        subnets: list[Subnet] = self._neutron("GET", "subnets", filters)["subnets"]
        return subnets

    def port_of(self, server: str) -> str:
        """Return the id of a server's port; "": it has none yet."""
        found = self._neutron("GET", "ports", {"device_id": server, "fields": "id"})["ports"]
        return str(found[0]["id"]) if found else ""

    def floating_addresses(self, **filters: str) -> list[FloatingAddress]:
        """Return the project's floating addresses that match filters of Neutron's."""
        found: list[FloatingAddress] = self._neutron("GET", "floatingips", filters)["floatingips"]
        return found

    def create_floating_address(self, body: Mapping[str, str]) -> FloatingAddress:
        """Allocate a floating address, for a port."""
        made: FloatingAddress = self._neutron("POST", "floatingips", body={"floatingip": body})["floatingip"]
        return made

    def give_floating_address(self, id: str, port: str) -> None:
        """Give a floating address to a port, even if another port has it."""
        self._neutron("PUT", f"floatingips/{id}", body={"floatingip": {"port_id": port}})

    def delete_floating_address(self, id: str) -> None:
        """Release a floating address. Idempotent."""
        _unless_missing(self.network_connection, f"/v2.0/floatingips/{id}", "DELETE")

    def _neutron(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, object] | None = None,
    ) -> _Json:
        action = _with(f"/v2.0/{path}", query or {})
        return self.network_connection.request(action, method=method, data=body or "").object


def _with(path: str, query: Mapping[str, str]) -> str:
    return f"{path}?{urlencode(query)}" if query else path


def _unless_missing(connection: Connection, path: str, method: str = "GET") -> _Json:
    """Return the answer; None: the resource does not exist."""
    try:
        return connection.request(path, method=method).object
    except BaseHTTPError as error:
        if int(error.code) == 404:
            return None
        raise
