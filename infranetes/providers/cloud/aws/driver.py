# SPDX-License-Identifier: Apache-2.0
"""libcloud's EC2 driver, with what it lacks or gets wrong.

- `create_node` has no argument for the metadata service's settings or for the tags of disks, and can't say
  that there is no public address: `Connection.adding` adds such parameters to its own, or replaces these.
- It refuses regions that are newer than its release: it is told another one, and then the right one.
- It sends everything as a GET, so user-data, which for us holds a key, would be in a URL and so in proxies'
  logs: requests are POSTed.
- It ignores `nextToken`, so long lists end early: all pages are requested.
- `list_nodes` also asks for addresses, naming each instance in a filter, which EC2 allows for at most 200:
  the instances' own answer has the addresses already.
- A node lacks the reason of its state, an image its root disk's name and its disks' sizes; whether a creation
  date is text or a date depends on libcloud's release.

libcloud is untyped; from here on its answers have the types of `libcloud_types`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any
from urllib.parse import quote

from libcloud.common.exceptions import BaseHTTPError
from libcloud.compute.base import Node, NodeImage, NodeSize, StorageVolume, VolumeSnapshot
from libcloud.compute.drivers.ec2 import NAMESPACE, EC2Connection, EC2NetworkSubnet, EC2NodeDriver
from libcloud.compute.types import NodeState
from libcloud.utils.xml import fixxpath

from infranetes.providers.cloud.aws.credentials import Keys
from infranetes.providers.cloud.aws.libcloud_types import (
    BlockDevice,
    Element,
    Image,
    Instance,
    InstanceType,
    Response,
    Subnet,
    VolumeModification,
)
from infranetes.providers.cloud.aws.regions import ec2
from infranetes.providers.cloud.interface import CloudError, ErrorKind

_MAX_PAGES = 100
_KNOWN_REGION = "us-east-1"  # a region that libcloud knows; its host and name are replaced
_FORM = "application/x-www-form-urlencoded; charset=utf-8"


class Connection(EC2Connection):  # type: ignore[misc]
    """Sends requests as forms and reads all pages of answers."""

    _additions: Mapping[str, str] = {}

    @contextmanager
    def adding(self, parameters: Mapping[str, str]) -> Iterator[None]:
        """Add parameters to every request in this block."""
        self._additions = parameters
        try:
            yield
        finally:
            self._additions = {}

    def request(
        self,
        action: str,
        params: Mapping[str, object] | None = None,
        **options: Any,  # Any: libcloud passes what its HTTP connection takes; a form needs none of it
    ) -> Response:
        answer, *more = self.pages(action, params or {})
        for page in more:
            for part in page.object:
                if len(part):
                    merged = answer.object.find(part.tag)
                    if merged is None:
                        answer.object.append(part)
                    else:
                        merged.extend(list(part))
        return answer

    def pages(self, action: str, params: Mapping[str, object]) -> Iterator[Response]:
        """Send a request, and yield the pages of its answer one by one."""
        form = {**params, **self._additions}
        token = ""
        for _ in range(_MAX_PAGES):
            page = self._post(action, {**form, "NextToken": token} if token else form)
            yield page
            token = text(page.object, "nextToken")
            if not token:
                return

    def _post(self, action: str, form: Mapping[str, object]) -> Response:
        everything = {**form, "Version": self.version}
        body = "&".join(
            f"{quote(str(key), safe='')}={quote(str(value), safe='')}" for key, value in everything.items()
        )
        response: Response = super().request(
            action, data=body, headers={"Content-Type": _FORM}, method="POST", retry_failed=False
        )
        return response


class Driver(EC2NodeDriver):  # type: ignore[misc]
    """The driver of one thread. :ivar keys: the keys that it signs requests with."""

    connectionCls = Connection
    connection: Connection
    keys: Keys

    def __init__(self, access_key: str, secret_key: str, region: str, **options: Any) -> None:
        # Any: libcloud has no types; see `ConnectionArguments` for what is passed.
        where = ec2(region)
        super().__init__(
            access_key,
            secret_key,
            region=_KNOWN_REGION,
            **{**options, "host": options.get("host") or where.host},
        )
        self.region_name = where.region

    # ---- Overrides of libcloud's

    def ex_describe_addresses(self, nodes: Sequence[Instance]) -> dict[str, list[str]]:
        return {node.id: [] for node in nodes}

    def _to_node(self, element: Element) -> Instance:
        instance: Instance = super()._to_node(element)
        instance.extra["state_reason"] = text(element, "stateReason/message")
        return instance

    def _to_image(self, element: Element) -> Image:
        image: Image = super()._to_image(element)
        name = image.extra["root_device_name"] = text(element, "rootDeviceName")
        disks = {
            text(disk, "deviceName"): int(text(disk, "ebs/volumeSize") or 0)
            for disk in items(element, "blockDeviceMapping/item")
        }
        image.extra["root_disk_gib"] = disks.get(name, 0)
        image.extra["disks_gib"] = sum(disks.values())
        image.extra["created"] = text(element, "creationDate")
        return image

    # ---- libcloud's calls with types

    def request(self, action: str, **parameters: str) -> Element:
        """Send a request that libcloud has no method for, and return its answer."""
        return self.answer(action, **parameters).object

    def answer(self, action: str, **parameters: str) -> Response:
        """Do what `request` does; return the answer with its headers."""
        return self.connection.request(self.path, params={"Action": action, **parameters})

    def pages(self, action: str, **parameters: str) -> Iterator[Element]:
        """Do what `request` does, page by page: for long lists, of which one page is in memory."""
        for page in self.connection.pages(self.path, {"Action": action, **parameters}):
            yield page.object

    def instance_types(self) -> list[InstanceType]:
        """Return the region's instance types, from libcloud's tables, which lack regions that are newer."""
        if self.region_name not in self.list_regions():
            return []
        sizes: list[InstanceType] = self.list_sizes()
        return sizes

    def images(self, ids: Sequence[str] = (), filters: Mapping[str, str] | None = None) -> list[Image]:
        """Return the images with these ids, or that match these filters."""
        images: list[Image] = self.list_images(ex_image_ids=list(ids) or None, ex_filters=filters)
        return images

    def instances(self, ids: Sequence[str] = (), filters: Mapping[str, str] | None = None) -> list[Instance]:
        """Return the instances with these ids, or that match these filters."""
        nodes: list[Instance] = self.list_nodes(ex_node_ids=list(ids) or None, ex_filters=filters)
        return nodes

    def ranges_of(self, subnets: Sequence[str]) -> list[tuple[str, str]]:
        """Return the VPCs and the addresses of subnets."""
        found: list[Subnet] = self.ex_list_subnets(subnet_ids=list(subnets))
        return [(subnet.extra["vpc_id"], subnet.extra["cidr_block"]) for subnet in found]

    def zones_of(self, subnets: Sequence[str]) -> dict[str, str]:
        """Return the availability zones of subnets by their ids. Fails unless all of them exist."""
        found: list[Subnet] = self.ex_list_subnets(subnet_ids=list(subnets))
        return {subnet.id: subnet.extra["zone"] for subnet in found}

    def run_instance(
        self,
        *,
        name: str,
        instance_type: str,
        image: str,
        user_data: bytes,
        key_name: str,
        subnet: str,
        security_groups: Sequence[str],
        tags: Mapping[str, str],
        client_token: str,
        disks: Sequence[BlockDevice],
        instance_profile: str,
    ) -> Instance:
        """Launch one instance; empty arguments are left out of the request."""
        instance: Instance = self.create_node(
            name=name,
            size=NodeSize(instance_type, instance_type, 0, 0, 0, 0.0, self),
            image=NodeImage(image, "", self),
            ex_userdata=user_data,
            ex_keyname=key_name or None,
            ex_subnet=EC2NetworkSubnet(subnet, "", "") if subnet else None,
            ex_security_group_ids=list(security_groups) or None,
            ex_metadata=dict(tags),
            ex_clienttoken=client_token,
            ex_blockdevicemappings=list(disks) or None,
            ex_iamprofile=instance_profile or None,
            ex_assign_public_ip=True,  # makes libcloud describe it; `Connection.adding` sets the value
        )
        return instance

    def terminate_instance(self, id: str) -> bool:
        """Ask for an instance's end, without waiting for its system. Returns whether it shuts down.

        libcloud would read the first state in the answer, which may be the one that the instance has left."""
        answer = self.request("TerminateInstances", **{"InstanceId.1": id, "SkipOsShutdown": "true"})
        told = {text(each, "instanceId"): each for each in items(answer, "instancesSet/item")}
        return text(told.get(id), "currentState/name") in ("shutting-down", "terminated")

    def console_output(self, id: str) -> str:
        """Return the end of an instance's console output."""
        return str(self.ex_get_console_output(self._node(id)).get("output") or "").strip()

    def console_log(self, id: str) -> bytes:
        """Return what an instance wrote to its serial port last, at most 64 KiB.

        Only instances of the Nitro system tell it while they run; others after boots and ends."""
        try:
            answer = self.request("GetConsoleOutput", InstanceId=id, Latest="true")
        except BaseHTTPError as error:
            if "UnsupportedOperation" not in str(error):
                raise
            answer = self.request("GetConsoleOutput", InstanceId=id)
        return base64.b64decode(text(answer, "output"))

    def stop_instance(self, id: str) -> None:
        """Ask an instance's system to power off, which EC2 ends after some minutes."""
        self.request("StopInstances", **{"InstanceId.1": id})

    def start_instance(self, id: str) -> None:
        """Ask for the start of a stopped instance."""
        self.request("StartInstances", **{"InstanceId.1": id})

    def set_user_data(self, id: str, content: bytes) -> None:
        """Replace a stopped instance's user-data, which EC2 refuses for one that is not stopped.

        libcloud can only send plain attributes, and takes any answer for a success."""
        encoded = base64.b64encode(content).decode()
        self.request("ModifyInstanceAttribute", **{"InstanceId": id, "UserData.Value": encoded})

    def attach(self, volume: str, instance: str, device: str) -> None:
        """Ask for a volume to be attached."""
        self.attach_volume(self._node(instance), self._volume(volume), device)

    def detach(self, volume: str, instance: str, *, force: bool) -> None:
        """Ask for a volume to be detached from this instance; libcloud would detach it from any."""
        forced = {"Force": "true"} if force else {}  # libcloud would send 1
        with self.connection.adding({"InstanceId": instance, **forced}):
            self.detach_volume(self._volume(volume), ex_force=force)

    def delete_volume(self, id: str) -> None:
        """Ask for a volume's end."""
        self.destroy_volume(self._volume(id))

    def delete_snapshot(self, id: str) -> None:
        """Ask for a snapshot's end."""
        self.destroy_volume_snapshot(VolumeSnapshot(id, self))

    def grow_volume(self, id: str, gib: int) -> None:
        """Ask for a larger volume."""
        self.ex_modify_volume(self._volume(id), {"Size": gib})

    def has_grown(self, id: str) -> bool:
        """Return whether the last modification of a volume has taken effect. :raise CloudError: it failed."""
        found: list[VolumeModification] = self.ex_describe_volumes_modifications(volume_ids=[id])
        last = max(found, key=lambda each: _seconds(each.start_time), default=None)
        if last is None or last.modification_state in ("optimizing", "completed"):
            return True
        if last.modification_state == "failed":
            raise CloudError(
                ErrorKind.CAPACITY, f"volume {id} can't grow: {last.status_message or 'EC2 gives no reason'}"
            )
        return False

    def _volume(self, id: str) -> StorageVolume:
        return StorageVolume(id, id, 0, self)

    def _node(self, id: str) -> Node:
        return Node(id, id, NodeState.UNKNOWN, [], [], self)


def _seconds(date: datetime | None) -> float:
    return date.timestamp() if date is not None else 0.0


def text(element: Element | None, path: str) -> str:
    """Return the text at a path of EC2's names; "" where there is none."""
    found = element.find(fixxpath(path, namespace=NAMESPACE)) if element is not None else None
    return (found.text or "") if found is not None else ""


def items(element: Element, path: str) -> list[Element]:
    """Return the elements at a path of EC2's names."""
    return list(element.findall(fixxpath(path, namespace=NAMESPACE)))
