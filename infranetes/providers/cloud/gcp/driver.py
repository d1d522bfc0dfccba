# SPDX-License-Identifier: Apache-2.0
"""libcloud's GCE driver, with what it lacks or gets wrong.

- Its constructor asks for all zones and regions, which for us is each thread's first act: they are not
  needed, since the API takes names as they are configured.
- Each connection gets a token of its own and keeps it in a file: see `credentials`.
- `create_node` and all calls for volumes wait up to three minutes for their operation and hold their thread;
  `destroy_node` does so too, or hides the operation; `create_node` knows neither spot VMs nor labels of disks
  and gives VMs an account that may read storage. Here requests return at once and their operation is polled.
- `create_volume` knows no labels, so for a moment nobody would know whose the disk is; `detach_volume` takes
  the disk's name for that of the device; none takes a `requestId`.
- `list_nodes` takes no filter, asks for all disks of the project too, and hides that a zone did not answer;
  `list_sizes` ends after the first page. Here all pages of one zone are requested: a list of all zones would
  be incomplete whenever any zone of the world is unreachable.
- Errors lose their headers, and with them how long not to call.

libcloud is untyped; from here on resources have the types of `libcloud_types`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from libcloud.common.base import ConnectionUserAndKey
from libcloud.common.google import GoogleBaseError
from libcloud.compute.base import Node, NodeLocation
from libcloud.compute.drivers.gce import API_VERSION, GCEConnection, GCENodeDriver, GCEResponse
from libcloud.compute.types import NodeState

from infranetes.providers.cloud.calls.connections import connection_arguments
from infranetes.providers.cloud.gcp.credentials import Credentials
from infranetes.providers.cloud.gcp.libcloud_types import (
    Address,
    Disk,
    Image,
    Instance,
    MachineType,
    MetadataItem,
    Operation,
    Snapshot,
    Subnetwork,
)
from infranetes.providers.cloud.interface import CloudError, ErrorKind

_MAX_PAGES = 1000
_PAGE = 500
_ROOT = f"https://www.googleapis.com/compute/{API_VERSION}/"  # libcloud uses only the path of such a URL

_Json: TypeAlias = Any
"""Google's answer, before the caller gives it the type of its resource."""


class Response(GCEResponse):  # type: ignore[misc]
    """Keeps the headers of errors."""

    def parse_body(self) -> _Json:
        try:
            return super().parse_body()
        except GoogleBaseError as error:
            error.headers = self.headers
            raise
        except AttributeError:  # libcloud fails on an error that has no code
            raise GoogleBaseError("an error without a code", self.status, None) from None


class Connection(GCEConnection):  # type: ignore[misc]
    """Sends requests with the token that all threads share."""

    responseCls = Response

    # Any: libcloud's base class takes them
    def __init__(self, *args: Any, project: str, credentials: Credentials, **options: Any) -> None:
        ConnectionUserAndKey.__init__(self, *args, **options)
        self.oauth2_credential = credentials
        self.request_path = f"/compute/{API_VERSION}/projects/{project}"
        self.gce_params = None

    def request(self, *args: Any, **options: Any) -> Any:  # Any: libcloud's base class takes and returns them
        try:
            return super().request(*args, **options)
        except GoogleBaseError as error:
            if error.http_code != 401:
                raise
            self.oauth2_credential._thd_forget(self._sent_token)
        return super().request(*args, **options)  # nothing was done: once more, with a new token

    def pre_connect_hook(
        self, params: dict[str, str], headers: dict[str, str]
    ) -> tuple[dict[str, str], dict[str, str]]:
        params, headers = super().pre_connect_hook(params, headers)
        self._sent_token = headers["Authorization"].removeprefix("Bearer ")
        return params, headers

    _sent_token = ""


class Driver(GCENodeDriver):  # type: ignore[misc]
    """The driver of one thread."""

    connectionCls = Connection
    connection: Connection

    def __init__(self, project: str, credentials: Credentials, timeout: float, endpoint: str) -> None:
        self._credentials = credentials
        super().__init__("-", "-", project=project, timeout=timeout, **connection_arguments(endpoint))

    # ---- Overrides of libcloud's

    def _ex_connection_class_kwargs(self) -> dict[str, object]:
        return {"project": self.project, "credentials": self._credentials}

    def ex_list_zones(self) -> list[object]:
        return []

    def ex_list_regions(self) -> list[object]:
        return []

    # ---- Instances and disks

    def instance(self, zone: str, name: str) -> Instance | None:
        """Return an instance, if it exists."""
        instance: Instance | None = self._find(f"/zones/{zone}/instances/{name}")
        return instance

    def insert_instance(self, zone: str, body: Mapping[str, object]) -> Operation:
        """Create an instance."""
        operation: Operation = self._request("POST", f"/zones/{zone}/instances", body=body)
        return operation

    def delete_instance(self, zone: str, name: str) -> Operation:
        """Delete an instance with its disk, without waiting for its system."""
        path = f"/zones/{zone}/instances/{name}"
        operation: Operation = self._request("DELETE", path, {"noGracefulShutdown": "true"})
        return operation

    def console_output(self, zone: str, name: str) -> str:
        """Return the end of an instance's output to its serial port."""
        extra = {"zone": NodeLocation(zone, zone, "", self), "boot_disk": None}
        node = Node(name, name, NodeState.UNKNOWN, [], [], self, extra=extra)
        return str(self.ex_get_serial_output(node) or "").strip()

    def console_log(self, zone: str, name: str) -> str:
        """Return what an instance wrote to its serial port last, at most 1 MiB."""
        found: dict[str, str] = self._request("GET", f"/zones/{zone}/instances/{name}/serialPort")
        return found.get("contents", "")

    def stop_instance(self, zone: str, name: str) -> Operation:
        """Ask an instance's system to power off, which Google ends after a minute and a half."""
        operation: Operation = self._request("POST", f"/zones/{zone}/instances/{name}/stop")
        return operation

    def start_instance(self, zone: str, name: str) -> Operation:
        """Start a stopped instance."""
        operation: Operation = self._request("POST", f"/zones/{zone}/instances/{name}/start")
        return operation

    def set_metadata(
        self, zone: str, name: str, fingerprint: str, items: Sequence[MetadataItem]
    ) -> Operation:
        """Replace an instance's attributes. :param fingerprint: of those that are replaced."""
        path = f"/zones/{zone}/instances/{name}/setMetadata"
        body = {"fingerprint": fingerprint, "items": items}
        operation: Operation = self._request("POST", path, body=body)
        return operation

    def disk(self, zone: str, name: str) -> Disk | None:
        """Return a disk, if it exists."""
        disk: Disk | None = self._find(f"/zones/{zone}/disks/{name}")
        return disk

    def zone_disks(self, zone: str, filter: str) -> list[Disk]:
        """Return a zone's disks that match a filter."""
        disks: list[Disk] = self._in_zone(zone, "disks", filter)
        return disks

    def zone_instances(self, zone: str, filter: str) -> list[Instance]:
        """Return a zone's instances that match a filter."""
        instances: list[Instance] = self._in_zone(zone, "instances", filter)
        return instances

    def insert_disk(self, zone: str, body: Mapping[str, object]) -> Operation:
        """Create a disk."""
        operation: Operation = self._request("POST", f"/zones/{zone}/disks", body=body)
        return operation

    def resize_disk(self, zone: str, name: str, gib: int, request_id: str) -> Operation:
        """Make a disk larger. :param request_id: a UUID; the request is served once for each."""
        operation: Operation = self._request(
            "POST", f"/zones/{zone}/disks/{name}/resize", {"requestId": request_id}, {"sizeGb": str(gib)}
        )
        return operation

    def delete_disk(self, zone: str, name: str) -> Operation | None:
        """Delete a disk; None: there is none. Idempotent."""
        operation: Operation | None = self._delete(f"/zones/{zone}/disks/{name}")
        return operation

    def attach_disk(self, zone: str, instance: str, body: Mapping[str, object], request_id: str) -> Operation:
        """Attach a disk to an instance. :param request_id: as in `resize_disk`."""
        path = f"/zones/{zone}/instances/{instance}/attachDisk"
        operation: Operation = self._request("POST", path, {"requestId": request_id}, body)
        return operation

    def detach_disk(self, zone: str, instance: str, device: str, request_id: str) -> Operation:
        """Detach a disk from an instance. :param request_id: as in `resize_disk`."""
        path = f"/zones/{zone}/instances/{instance}/detachDisk"
        operation: Operation = self._request("POST", path, {"deviceName": device, "requestId": request_id})
        return operation

    # ---- Snapshots

    def snapshot(self, name: str) -> Snapshot | None:
        """Return a snapshot, if it exists."""
        snapshot: Snapshot | None = self._find(f"/global/snapshots/{name}")
        return snapshot

    def snapshots(self, filter: str) -> list[Snapshot]:
        """Return the snapshots that match a filter."""
        return [
            one for page in self._pages("/global/snapshots", filter=filter) for one in page.get("items") or ()
        ]

    def create_snapshot(self, zone: str, disk: str, body: Mapping[str, object]) -> Operation:
        """Take a snapshot of a disk."""
        operation: Operation = self._request("POST", f"/zones/{zone}/disks/{disk}/createSnapshot", body=body)
        return operation

    def delete_snapshot(self, name: str) -> Operation | None:
        """Delete a snapshot; None: there is none. Idempotent."""
        operation: Operation | None = self._delete(f"/global/snapshots/{name}")
        return operation

    # ---- Operations

    def operation(self, zone: str, name: str) -> Operation | None:
        """Return an operation; None: it is not known everywhere yet. :param zone: `""`: it is of no zone.

        :raise GoogleBaseError: it failed; the error is as if its request had failed."""
        place = f"zones/{zone}" if zone else "global"
        operation: Operation | None = self._find(f"/{place}/operations/{name}")
        return operation

    def operations(self, zone: str, filter: str) -> list[Operation]:
        """Return the zone's latest operations that match a filter."""
        page = self._request("GET", f"/zones/{zone}/operations", {"filter": filter})
        operations: list[Operation] = page.get("items") or []
        return operations

    # ---- What VMs are made of

    def image(self, path: str) -> Image | None:
        """Return an image, or the newest of a family, by its path from `projects` on."""
        image: Image | None = self._find(path)
        return image

    def images(self, project: str, filter: str) -> Iterator[Image]:
        """A project's images that match a filter."""
        for page in self._pages(f"projects/{project}/global/images", filter=filter):
            yield from page.get("items") or []

    def insert_image(self, body: Mapping[str, object], request_id: str) -> Operation:
        """Make an image. libcloud's `ex_create_image` knows no architecture, and waits.

        :param request_id: as in `resize_disk`."""
        operation: Operation = self._request("POST", "/global/images", {"requestId": request_id}, body)
        return operation

    def delete_image(self, name: str) -> Operation | None:
        """Delete an image of this project; None: there is none. Idempotent."""
        operation: Operation | None = self._delete(f"/global/images/{name}")
        return operation

    def machine_types(self, zone: str) -> Iterator[MachineType]:
        """A zone's machine types."""
        for page in self._pages(f"/zones/{zone}/machineTypes"):
            yield from page.get("items") or []

    def address(self, region: str, name: str) -> Address | None:
        """Return a reserved address."""
        address: Address | None = self._find(f"/regions/{region}/addresses/{name}")
        return address

    def subnetwork(self, region: str, name: str) -> Subnetwork | None:
        """Return a region's subnetwork of that name; None: there is none."""
        found: Subnetwork | None = self._find(f"/regions/{region}/subnetworks/{name}")
        return found

    # ---- Requests

    def _request(
        self,
        method: str,
        path: str,
        params: Mapping[str, str | int] | None = None,
        body: Mapping[str, object] | None = None,
    ) -> _Json:
        """Return what the API answers.

        :param path: of this project, such as `/zones/Z/instances`; or of any: `projects/P/global/…`."""
        action = path if path.startswith("/") else _ROOT + path
        return self.connection.request(
            action, params=params, data=body, method=method, retry_failed=False
        ).object

    def _find(self, path: str) -> _Json:
        """Return a resource; None: it does not exist."""
        return self._unless_missing("GET", path)

    def _delete(self, path: str) -> _Json:
        return self._unless_missing("DELETE", path)

    def _unless_missing(self, method: str, path: str) -> _Json:
        try:
            return self._request(method, path)
        except GoogleBaseError as error:
            if int(error.http_code or 0) == 404:
                return None
            raise

    def _pages(self, path: str, **params: str | int) -> Iterator[Mapping[str, _Json]]:
        params["maxResults"] = _PAGE
        for _ in range(_MAX_PAGES):
            page = self._request("GET", path, params)
            yield page
            if not page.get("nextPageToken"):
                return
            params["pageToken"] = page["nextPageToken"]
        raise CloudError(ErrorKind.UNEXPECTED, f"the list {path} does not end")

    def _in_zone(self, zone: str, kind: str, filter: str) -> _Json:
        found: list[object] = []
        for page in self._pages(f"/zones/{zone}/{kind}", filter=filter):
            found += page.get("items") or []
        return found
