# SPDX-License-Identifier: Apache-2.0
"""EC2's calls about images, on top of moto, whose images have no disks and accept any snapshot and any name.

Here a registered image is a copy of another image of moto's, shown with the disk that it was registered with.
"""

from __future__ import annotations

from collections.abc import Mapping
from xml.etree import ElementTree

import attrs

from tests.support.clouds.ec2_volumes import Answer, Call, Forward, parsed, path, text_of
from tests.support.clouds.ec2errors import error
from tests.support.clouds.moto import REGION

_SNAPSHOT = "BlockDeviceMapping.1.Ebs.SnapshotId"


@attrs.define
class Ec2Images:
    """The calls about images.

    :param forward: asks moto, and returns its answer with EC2's namespace.
    :param states: of snapshots that are not complete. :param source: the image whose copies are made.
    :ivar registered: the requests, by the images that they made."""

    forward: Forward
    states: Mapping[str, str]
    source: str
    registered: dict[str, Call] = attrs.field(factory=dict)

    def serves(self, action: str) -> bool:
        """Whether a call is about images."""
        return action in ("RegisterImage", "DescribeImages")

    async def answer(self, call: Call) -> Answer:
        """Return EC2's answer."""
        if call["Action"] == "RegisterImage":
            return await self._register(call)
        status, body = await self.forward(call)
        return status, self._shown(body) if status == 200 and self.registered else body

    async def _register(self, call: Call) -> Answer:
        version = {"Version": call["Version"]}
        snapshot = call.get(_SNAPSHOT, "")
        if snapshot in self.states:
            return 400, error("InvalidParameterValue", f"Snapshot {snapshot} is {self.states[snapshot]}")
        named = {"Action": "DescribeImages", "Filter.1.Name": "name", "Filter.1.Value.1": call["Name"]}
        _, found = await self.forward({**named, **version})
        if parsed(found).find(path("imagesSet/item")) is not None:
            return 400, error("InvalidAMIName.Duplicate", f"AMI name {call['Name']} is already in use")
        held = {"Action": "DescribeSnapshots", "SnapshotId.1": snapshot}
        status, body = await self.forward({**held, **version})
        if status != 200:
            return status, body
        copied = {"Action": "CopyImage", "SourceImageId": self.source, "SourceRegion": REGION}
        status, body = await self.forward({**copied, "Name": call["Name"], **version})
        if status == 200:
            self.registered[text_of(parsed(body), "imageId")] = call
        return status, body.replace(b"CopyImageResponse", b"RegisterImageResponse")

    def _shown(self, body: bytes) -> bytes:
        """Return an answer of moto's with the disks of the registered images."""
        answer = parsed(body)
        for image in answer.iterfind(path("imagesSet/item")):
            call = self.registered.get(text_of(image, "imageId"))
            if call is None:
                continue
            for name, value in (
                ("rootDeviceName", call["RootDeviceName"]),
                ("architecture", call["Architecture"]),
                ("blockDeviceMapping/item/deviceName", call["BlockDeviceMapping.1.DeviceName"]),
                ("blockDeviceMapping/item/ebs/snapshotId", call[_SNAPSHOT]),
            ):
                element = image.find(path(name))
                assert element is not None, name
                element.text = value
        return ElementTree.tostring(answer)
