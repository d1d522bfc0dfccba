# SPDX-License-Identifier: Apache-2.0
"""libcloud's driver for Azure Resource Manager, with what it lacks or gets wrong.

- Its connection logs in when it is made, knows applications' secrets only, and takes no other endpoint: see
  `credentials`.
- `create_node` knows neither tags of network interfaces, spot VMs, user-data, zones, nor what is deleted with
  a VM, and can't be told not to change a VM that exists; `destroy_node` and its polling hold the thread for
  minutes; `list_nodes` asks for each VM's state and interface by itself; `list_sizes` uses a deprecated call
  that knows no capabilities. Here requests are made as Azure documents them, and return at once.
- `attach_volume` and `detach_volume` write back all of a VM's disks as they were known before, so that of two
  changes one undoes the other; here each is a request about one disk. `create_volume` and `ex_resize_volume`
  keep no operation, which alone says why a disk was not made or enlarged; the former knows no disk as a
  source, and names a snapshot as Azure takes it for blobs only.
- An answer 204, which deletions of what is gone have, is an error to it, and errors lose their codes.

libcloud is untyped; from here on resources have the types of `resources`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias
from urllib.parse import parse_qsl, urlsplit

from libcloud.common.azure_arm import AzureJsonResponse, AzureResourceManagementConnection
from libcloud.common.base import Connection as LibcloudConnection
from libcloud.common.base import ConnectionUserAndKey
from libcloud.common.base import Response as LibcloudResponse
from libcloud.common.types import MalformedResponseError
from libcloud.compute.drivers.azure_arm import AzureNodeDriver

from infranetes.providers.cloud.azure.credentials import Credentials, environment
from infranetes.providers.cloud.azure.errors import AzureError
from infranetes.providers.cloud.azure.names import Group
from infranetes.providers.cloud.azure.resources import (
    Disk,
    Image,
    Nic,
    Operation,
    PublicAddress,
    Sku,
    Snapshot,
    Version,
    Vm,
)
from infranetes.providers.cloud.azure.settings import Settings
from infranetes.providers.cloud.calls.connections import connection_arguments
from infranetes.providers.cloud.interface import CloudError, ErrorKind

COMPUTE, NETWORK = "2025-04-01", "2024-10-01"  # versions of the API
DISKS, GALLERIES, SKUS, RESOURCES = "2025-01-02", "2025-03-03", "2021-07-01", "2021-04-01"
VM, NIC, ADDRESS, DISK, SNAPSHOT = (
    "Microsoft.Compute/virtualMachines",
    "Microsoft.Network/networkInterfaces",
    "Microsoft.Network/publicIPAddresses",
    "Microsoft.Compute/disks",
    "Microsoft.Compute/snapshots",
)
_VERSIONS = {VM: COMPUTE, NIC: NETWORK, ADDRESS: NETWORK, DISK: DISKS, SNAPSHOT: DISKS}
_MAX_PAGES = 1000
_ACCEPTED, _BEHIND_THE_END = 202, 416  # statuses of answers

_Json: TypeAlias = Any
"""Azure's answer, before the caller gives it the type of its resource."""


class Response(AzureJsonResponse):  # type: ignore[misc]
    """Keeps the codes and headers of errors."""

    def success(self) -> bool:
        return int(self.status) < 300

    def parse_error(self) -> str:
        try:
            said = json.loads(self.body)["error"]
            code, message = str(said["code"]), str(said.get("message") or "")
        except (ValueError, KeyError, TypeError, AttributeError):
            code, message = "", f"status {self.status}"
        raise AzureError(int(self.status), code, message, self.headers)

    def parse_body(self) -> _Json:
        body = super().parse_body()
        if body and not isinstance(body, dict):
            raise MalformedResponseError("no object", driver=self.connection.driver)
        return body or {}


class Connection(AzureResourceManagementConnection):  # type: ignore[misc]
    """Sends requests with the token that all threads share."""

    responseCls = Response

    # Any: libcloud's base class takes them
    def __init__(self, *args: Any, credentials: Credentials, **options: Any) -> None:
        for name in ("tenant_id", "subscription_id", "cloud_environment"):
            options.pop(name, None)
        ConnectionUserAndKey.__init__(self, *args, **options)
        self._credentials = credentials
        self._sent_token = ""

    def connect(self, **options: Any) -> Any:  # Any: libcloud's base class takes and returns them
        return ConnectionUserAndKey.connect(self, **options)

    def add_default_headers(self, headers: dict[str, str]) -> dict[str, str]:
        self._sent_token = self._credentials.access_token
        headers["Content-Type"] = "application/json"
        headers["Authorization"] = f"Bearer {self._sent_token}"
        return headers

    def request(self, *args: Any, **options: Any) -> Any:  # Any: libcloud's base class takes and returns them
        try:
            return ConnectionUserAndKey.request(self, *args, **options)
        except AzureError as error:
            if error.code != 401:
                raise
            self._credentials._thd_forget(self._sent_token)
        return ConnectionUserAndKey.request(self, *args, **options)  # once more, with a new token


class _StorageAnswer(LibcloudResponse):  # type: ignore[misc]
    """An answer of Azure's storage, whose content is bytes."""

    # Any: libcloud's base class takes them
    def __init__(self, response: Any, connection: Any) -> None:
        response.encoding = "latin-1"  # libcloud reads text, and has its encoding guessed, which takes long
        self.content: bytes = response.content
        super().__init__(response, connection)

    def success(self) -> bool:
        return int(self.status) in (200, 206, _BEHIND_THE_END)

    def parse_error(self) -> str:
        code = self.headers.get("x-ms-error-code", "")
        raise AzureError(int(self.status), code, "a serial log can't be read", self.headers)


class _Storage(LibcloudConnection):  # type: ignore[misc]
    responseCls = _StorageAnswer


class Driver(AzureNodeDriver):  # type: ignore[misc]
    """The driver of one thread."""

    connectionCls = Connection
    connection: Connection

    def __init__(self, settings: Settings, group: Group, credentials: Credentials, timeout: float) -> None:
        self._credentials = credentials
        self._group = group
        endpoint = settings.endpoint or environment(settings.environment)["resourceManagerEndpointUrl"]
        self._own = urlsplit(endpoint).netloc
        super().__init__(
            settings.tenant,
            settings.subscription,
            "-",
            "-",
            timeout=timeout,
            **connection_arguments(endpoint),
        )

    def _ex_connection_class_kwargs(self) -> dict[str, object]:
        return {"credentials": self._credentials}

    # ---- VMs and what belongs to them

    def vm(self, name: str) -> Vm | None:
        """Return a VM with its state, if it exists."""
        path = self._group.resource(VM, name)
        vm: Vm | None = self._find(path, COMPUTE, {"$expand": "instanceView"})
        return vm

    def vms(self) -> list[Vm]:
        """Return the resource group's VMs, without their states."""
        vms: list[Vm] = self._in_group(VM)
        return vms

    def states(self) -> list[Vm]:
        """Return all VMs of the subscription with their states, and with little else."""
        path = f"/subscriptions/{self._group.subscription}/providers/{VM}"
        return list(self._pages(path, COMPUTE, {"statusOnly": "true"}))

    def tagged(self, name: str, value: str) -> list[str]:
        """Return the ids of the resource group's resources that have a tag, of all kinds.

        Resource Manager answers this by itself. It may lag behind, and tells neither tags nor states."""
        quoted = value.replace("'", "''")
        filters = {"$filter": f"tagName eq '{name}' and tagValue eq '{quoted}'"}
        return [str(each["id"]) for each in self._pages(f"{self._group.path}/resources", RESOURCES, filters)]

    def create_vm(self, name: str, body: Mapping[str, object]) -> str:
        """Create a VM. Returns its operation's path; "": it is done.

        :raise AzureError: `PreconditionFailed`: there is a VM of that name."""
        return self._begin("PUT", self._group.resource(VM, name), COMPUTE, body, {"If-None-Match": "*"})

    def _begin(
        self,
        method: str,
        path: str,
        version: str,
        body: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> str:
        """Ask for a change. Returns its operation's path; "": it is done."""
        answer = self.connection.request(
            path,
            params={"api-version": version},
            data=body,
            headers=dict(headers or {}),
            method=method,
            retry_failed=False,
        )
        link = answer.headers.get("azure-asyncoperation", "")
        if not link and int(answer.status) == _ACCEPTED:
            link = answer.headers.get("location", "")
        parts = urlsplit(link)
        if link and parts.netloc != self._own:
            raise CloudError(ErrorKind.UNEXPECTED, f"an operation is at {parts.netloc}, not at {self._own}")
        return f"{parts.path}?{parts.query}" if link else ""

    def change_power(self, name: str, action: Literal["start", "powerOff", "deallocate"]) -> str:
        """Start, power off or deallocate a VM. Returns its operation's path; "": it is done.

        Its system is asked to power off first. A VM that is off is billed until it is deallocated."""
        return self._begin("POST", f"{self._group.resource(VM, name)}/{action}", COMPUTE)

    def user_data(self, name: str) -> str:
        """Return a VM's user-data, in base64; "": it has none."""
        path = self._group.resource(VM, name)
        found = self._request("GET", path, {"api-version": COMPUTE, "$expand": "userData"})
        return str(found.get("properties", {}).get("userData") or "")

    def set_user_data(self, name: str, content: str) -> str:
        """Ask for other user-data of a VM. Returns its operation's path; "": it is done.

        :param content: in base64."""
        body = {"properties": {"userData": content}}
        return self._begin("PATCH", self._group.resource(VM, name), COMPUTE, body)

    def operation(self, path: str) -> Operation | None:
        """Return an operation; None: it is no longer known. :param path: with its query.

        Where Azure names only the place of the result, that answers 202 until there is one, or an error."""
        parts = urlsplit(path)
        query = dict(parse_qsl(parts.query))
        try:
            answer = self.connection.request(parts.path, params=query, retry_failed=False)
        except AzureError as error:
            if error.code == 404:
                return None
            if error.code not in (400, 409):
                raise
            code = error.error_code
            said: Operation = {"error": {"code": code, "message": str(error).removeprefix(f"{code}: ")}}
            return {"status": "Failed", **said}
        said = answer.object
        if "status" not in said:
            return {"status": "InProgress" if int(answer.status) == _ACCEPTED else "Succeeded"}
        return said

    def create(self, kind: str, name: str, body: Mapping[str, object]) -> _Json:
        """Create a resource of the group, or make it what `body` says; return it. Idempotent."""
        path = self._group.resource(kind, name)
        return self._request("PUT", path, {"api-version": _VERSIONS[kind]}, body)

    def delete(self, kind: str, name: str) -> bool:
        """Delete a resource of the group. Returns whether there was one. Idempotent."""
        params = {"api-version": _VERSIONS[kind]}
        if kind == VM:
            params["forceDeletion"] = "true"  # does not wait for the guest to shut down
        try:
            answer = self.connection.request(
                self._group.resource(kind, name), params=params, method="DELETE", retry_failed=False
            )
        except AzureError as error:
            if error.code == 404:
                return False
            raise
        return int(answer.status) != 204

    def nics(self) -> list[Nic]:
        """Return the resource group's network interfaces."""
        nics: list[Nic] = self._in_group(NIC)
        return nics

    def nic(self, name: str) -> Nic | None:
        """Return a network interface of the resource group, if it exists."""
        nic: Nic | None = self._find(self._group.resource(NIC, name), NETWORK)
        return nic

    def disk(self, name: str) -> Disk | None:
        """Return a disk of the resource group, if it exists."""
        disk: Disk | None = self._find(self._group.resource(DISK, name), DISKS)
        return disk

    # ---- Disks that outlive VMs, and snapshots

    def disks(self) -> list[Disk]:
        """Return the resource group's disks."""
        disks: list[Disk] = self._in_group(DISK)
        return disks

    def snapshots(self) -> list[Snapshot]:
        """Return the resource group's snapshots."""
        snapshots: list[Snapshot] = self._in_group(SNAPSHOT)
        return snapshots

    def snapshot(self, name: str) -> Snapshot | None:
        """Return a snapshot of the resource group, if it exists."""
        snapshot: Snapshot | None = self._find(self._group.resource(SNAPSHOT, name), DISKS)
        return snapshot

    def begin_create(self, kind: str, name: str, body: Mapping[str, object]) -> str:
        """Ask for a disk or a snapshot. Idempotent. Returns its operation's path; "": it is done."""
        return self._begin("PUT", self._group.resource(kind, name), _VERSIONS[kind], body)

    def begin_delete(self, kind: str, name: str) -> str:
        """Ask for the end of a disk or a snapshot. Returns as `begin_create`. Idempotent."""
        try:
            return self._begin("DELETE", self._group.resource(kind, name), _VERSIONS[kind])
        except AzureError as error:
            if error.code == 404:
                return ""
            raise

    def grow_disk(self, name: str, gib: int) -> str:
        """Ask for a larger disk. Returns as `begin_create`."""
        body = {"properties": {"diskSizeGB": gib}}
        return self._begin("PATCH", self._group.resource(DISK, name), DISKS, body)

    def attach_disk(self, vm: str, disk: str, lun: int) -> str:
        """Ask for a VM to be given a disk, which outlives it. Returns as `begin_create`.

        :param lun: a number that none of its disks has."""
        asked = {"lun": lun, "caching": "None", "deleteOption": "Detach"}
        return self._change_disks(vm, {"dataDisksToAttach": [{"diskId": self._disk_id(disk), **asked}]})

    def detach_disk(self, vm: str, disk: str, force: bool) -> str:
        """Ask for a disk to be taken from a VM. Returns as `begin_create`.

        :param force: whether also if its system does not release the disk."""
        how = {"detachOption": "ForceDetach"} if force else {}
        return self._change_disks(vm, {"dataDisksToDetach": [{"diskId": self._disk_id(disk), **how}]})

    def _change_disks(self, vm: str, body: Mapping[str, object]) -> str:
        return self._begin("POST", f"{self._group.resource(VM, vm)}/attachDetachDataDisks", COMPUTE, body)

    def _disk_id(self, name: str) -> str:
        return self._group.resource(DISK, name)

    def public_addresses(self) -> list[PublicAddress]:
        """Return the resource group's public addresses."""
        addresses: list[PublicAddress] = self._in_group(ADDRESS)
        return addresses

    def public_address(self, name: str) -> PublicAddress | None:
        """Return a public address of the resource group, if it exists."""
        address: PublicAddress | None = self._find(self._group.resource(ADDRESS, name), NETWORK)
        return address

    def serial_log(self, name: str) -> str:
        """Return a link to what a VM has written to its serial port, signed for two hours; "": there is
        none. Azure counts this as a change."""
        path = f"{self._group.resource(VM, name)}/retrieveBootDiagnosticsData"
        try:
            found = self._request("POST", path, {"api-version": COMPUTE})
        except AzureError as error:
            if error.code in (404, 409):
                return ""
            raise
        return str(found.get("serialConsoleLogBlobUri") or "")

    def blob(self, link: str, begin: int, size: int) -> bytes | None:
        """Return a part of a blob; None: it ends before that. :param link: signed: no token is sent there.

        :raise AzureError: 404: there is no such blob. 403: the link is no longer valid."""
        parts = urlsplit(link)
        connection = _Storage(
            host=parts.netloc, secure=parts.scheme == "https", timeout=self.connection.timeout
        )
        answer = connection.request(
            parts.path,
            params=dict(parse_qsl(parts.query)),
            headers={"Range": f"bytes={begin}-{begin + size - 1}"},
            retry_failed=False,
        )
        content: bytes = answer.content[:size]
        return content if int(answer.status) != _BEHIND_THE_END else None

    # ---- What VMs are made of

    def image(self, id: str) -> Image | None:
        """Return an image of a gallery, if it exists."""
        image: Image | None = self._find(id, GALLERIES)
        return image

    def images(self, gallery: str) -> Iterator[Image]:
        """A gallery's images."""
        path = f"{self._group.resource('Microsoft.Compute/galleries', gallery)}/images"
        yield from self._pages(path, GALLERIES)

    def version(self, id: str) -> Version | None:
        """Return a version of an image, if it exists."""
        version: Version | None = self._find(id, GALLERIES)
        return version

    def versions(self, image: str) -> Iterator[Version]:
        """An image's versions. :param image: its id."""
        yield from self._pages(f"{image}/versions", GALLERIES)

    def has_subnet(self, id: str) -> bool:
        """Return whether there is a subnet with this id."""
        return self._find(id, NETWORK) is not None

    def addresses_of(self, subnet: str) -> list[str]:
        """Return a subnet's ranges of addresses."""
        its = (self._find(subnet, NETWORK) or {}).get("properties", {})
        return [*its.get("addressPrefixes", ()), *filter(None, [its.get("addressPrefix")])]

    def skus(self, location: str) -> Iterator[Sku]:
        """Return the offers of a location: sizes of VMs, and much else."""
        path = f"/subscriptions/{self._group.subscription}/providers/Microsoft.Compute/skus"
        yield from self._pages(path, SKUS, {"$filter": f"location eq '{location}'"})

    # ---- Requests

    def _request(
        self, method: str, path: str, params: Mapping[str, str], body: Mapping[str, object] | None = None
    ) -> _Json:
        """Return what Azure answers. A look takes several reads: one that fails within Azure is repeated
        once, so that the others are not wasted."""
        try:
            return self._send(method, path, params, body)
        except AzureError as error:
            if method != "GET" or int(error.code) < 500:
                raise
        return self._send(method, path, params, body)

    def _send(
        self, method: str, path: str, params: Mapping[str, str], body: Mapping[str, object] | None
    ) -> _Json:
        return self.connection.request(
            path, params=dict(params), data=body, method=method, retry_failed=False
        ).object

    def _find(self, path: str, version: str, params: Mapping[str, str] | None = None) -> _Json:
        """Return a resource; None: it does not exist."""
        return self._unless_missing("GET", path, {"api-version": version, **(params or {})})

    def _unless_missing(self, method: str, path: str, params: Mapping[str, str]) -> _Json:
        try:
            return self._request(method, path, params)
        except AzureError as error:
            if error.code == 404:
                return None
            raise

    def _in_group(self, kind: str) -> _Json:
        return list(self._pages(f"{self._group.path}/providers/{kind}", _VERSIONS[kind]))

    def _pages(self, path: str, version: str, params: Mapping[str, str] | None = None) -> Iterator[_Json]:
        query = {"api-version": version, **(params or {})}
        for _ in range(_MAX_PAGES):
            page = self._request("GET", path, query)
            yield from page.get("value") or ()
            following = page.get("nextLink") or ""
            if not following:
                return
            parts = urlsplit(following)
            if parts.netloc != self._own:
                raise CloudError(
                    ErrorKind.UNEXPECTED, f"a list continues at {parts.netloc}, not at {self._own}"
                )
            path, query = parts.path, dict(parse_qsl(parts.query))
        raise CloudError(ErrorKind.UNEXPECTED, f"the list {path} does not end")
