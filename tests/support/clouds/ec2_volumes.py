# SPDX-License-Identifier: Apache-2.0
"""EBS volumes like EC2's, on top of moto: with states that take time, and refusals.

moto makes, attaches, detaches and modifies volumes at once, attaches one twice, with any device name and in
any zone, and knows no client tokens of volumes. Sources of the refusals: EC2 API reference, "Error codes for
the Amazon EC2 API"; EBS user guide, "Requirements for Amazon EBS volume modifications" (once in six hours)
and "Amazon EBS volume limits for Amazon EC2 instances".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from xml.etree import ElementTree

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall

from infranetes_common.reactors import IReactor
from tests.support.clouds.ec2errors import error

Call = dict[str, str]
Answer = tuple[int, bytes]
"""Status and body."""

Forward = Callable[[Call], Awaitable[Answer]]

NAMESPACE = "http://ec2.amazonaws.com/doc/2016-11-15/"
_NS = f"{{{NAMESPACE}}}"
_REQUEST = "<requestId>r</requestId>"
_VERSION = {"Version": "2016-11-15"}
ElementTree.register_namespace("", NAMESPACE)


class Refusal(Exception):
    """EC2's refusal of a call."""

    def __init__(self, code: str, words: str) -> None:
        super().__init__(words)
        self.code = code


@attrs.define
class Ec2Volumes:
    """The calls about volumes.

    :param forward: asks moto, and returns its answer with EC2's namespace.
    :ivar seconds: how long each step takes.
    :ivar age: seconds by which volumes seem to have been made earlier than they are.
    :ivar most: the number of volumes that an instance may have, including its root volume.
    :ivar six_hours: whether a volume that was modified can't be modified again yet.
    :ivar stuck: volumes that never leave their transitional state."""

    reactor: IReactor
    forward: Forward
    seconds: float = 0.05
    age: float = 0.0
    most: int = 28
    six_hours: bool = True
    stuck: set[str] = attrs.field(factory=set)
    _tokens: dict[str, tuple[Call, bytes]] = attrs.field(factory=dict)
    _states: dict[str, str] = attrs.field(factory=dict)  # of volumes that are on their way
    _modified: set[str] = attrs.field(factory=set)
    _growths: dict[str, _Growth] = attrs.field(factory=dict)  # each volume's last one
    _timers: list[IDelayedCall] = attrs.field(factory=list)

    def stop(self) -> None:
        """Make no more steps."""
        for timer in self._timers:
            if timer.active():
                timer.cancel()

    def serves(self, action: str) -> bool:
        """Whether a call is about volumes."""
        return action.endswith("Volume") or action.startswith("DescribeVolumes")

    async def answer(self, call: Call) -> Answer:
        """Return EC2's answer."""
        serve = {
            "CreateVolume": self._create,
            "AttachVolume": self._attach,
            "DetachVolume": self._detach,
            "ModifyVolume": self._modify,
            "DeleteVolume": self._delete,
            "DescribeVolumes": self._describe,
            "DescribeVolumesModifications": self._describe_modifications,
        }[call["Action"]]
        try:
            return await serve(call)
        except Refusal as refusal:
            return 400, error(refusal.code, str(refusal))

    # ---- Calls

    async def _create(self, call: Call) -> Answer:
        token = call.get("ClientToken", "")
        if token in self._tokens:
            asked, body = self._tokens[token]
            if asked != call:
                raise Refusal("IdempotentParameterMismatch", "The client token was used before")
            return 200, body
        status, body = await self.forward(call)
        if status != 200:
            return status, body
        made = parsed(body)
        self._begin(text_of(made, "volumeId"), "creating")
        body = self._shown(self._aged(body))
        if token:
            self._tokens[token] = (call, body)
        return status, body

    async def _attach(self, call: Call) -> Answer:
        volume, instance = call["VolumeId"], call["InstanceId"]
        found = await self._volume(volume)
        state = self._states.get(volume, text_of(found, "status"))
        if text_of(found, "status") == "in-use":
            raise Refusal("VolumeInUse", f"{volume} is already attached to an instance")
        if state != "available":
            raise Refusal("IncorrectState", f"{volume} is not 'available'.")
        running = await self._instance(instance)
        if text_of(running, "instanceState/name") != "running":
            raise Refusal("IncorrectState", f"Instance '{instance}' is not 'running'.")
        if text_of(running, "placement/availabilityZone") != text_of(found, "availabilityZone"):
            raise Refusal("InvalidVolume.ZoneMismatch", f"The volume '{volume}' is not in the same zone")
        names = [
            text_of(each, "deviceName") for each in running.iter(f"{_NS}item") if text_of(each, "deviceName")
        ]
        if call["Device"] in names:
            words = f"Attachment point {call['Device']} is already in use"
            raise Refusal(
                "InvalidParameterValue", f"Invalid value '{call['Device']}' for unixDevice. {words}"
            )
        if len(names) >= self.most:
            raise Refusal("AttachmentLimitExceeded", "Instance's limit of attachments is exceeded")
        self._begin(volume, "attaching")
        return await self.forward(call)

    async def _detach(self, call: Call) -> Answer:
        volume, instance = call["VolumeId"], call.get("InstanceId", "")
        found = await self._volume(volume)
        holders = [text_of(each, "instanceId") for each in found.iter(f"{_NS}item")]
        if text_of(found, "status") == "available":
            raise Refusal("IncorrectState", f"Volume '{volume}' is in the 'available' state.")
        if instance and instance not in holders:
            raise Refusal("InvalidAttachment.NotFound", f"{volume} is not attached to {instance}")
        if self._states.get(volume) not in (None, "detaching"):
            raise Refusal("IncorrectState", f"Volume '{volume}' is in the '{self._states[volume]}' state.")
        if call.get("Force") and volume in self.stuck:
            self.stuck.discard(volume)
        if self._states.get(volume) != "detaching" or call.get("Force"):
            self._begin(volume, "detaching", call)
        return 200, _detaching(found, instance)

    async def _modify(self, call: Call) -> Answer:
        volume = call["VolumeId"]
        found = await self._volume(volume)
        if self._states.get(volume) == "modifying":
            raise Refusal("IncorrectModificationState", f"Cannot modify {volume}: it is being modified")
        if volume in self._modified and self.six_hours:
            words = "You've reached the maximum modification rate per volume limit. Wait at least 6 hours "
            raise Refusal("VolumeModificationRateExceeded", words + "between modifications per EBS volume.")
        if int(call["Size"]) < int(text_of(found, "size")):
            raise Refusal("InvalidParameterValue", "New size cannot be smaller than existing size")
        self._growths[volume] = _Growth(
            volume,
            text_of(found, "size"),
            call["Size"],
            text_of(found, "volumeType"),
            text_of(found, "iops"),
            datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        )
        self._begin(volume, "modifying", call)
        return 200, self._modifications(volume, "ModifyVolume", "volumeModification")

    async def _delete(self, call: Call) -> Answer:
        volume = call["VolumeId"]
        state = self._states.get(volume, text_of(await self._volume(volume), "status"))
        if state != "available":
            raise Refusal("VolumeInUse", f"Volume {volume} is {state}")
        return await self.forward(call)

    async def _describe(self, call: Call) -> Answer:
        status, body = await self.forward(call)
        return status, self._shown(body) if status == 200 else body

    async def _describe_modifications(self, call: Call) -> Answer:
        return 200, self._modifications(call["VolumeId.1"], "DescribeVolumesModifications", "item")

    # ---- States

    def _begin(self, volume: str, state: str, call: Call | None = None) -> None:
        """Put a volume into a state for a while; at its end `call` is made to moto."""
        self._states[volume] = state

        def end() -> None:
            if volume in self.stuck:
                return
            if call is None:
                self._states.pop(volume, None)
            else:
                Deferred.fromCoroutine(self._end(volume, call)).addErrback(lambda failure: None)

        self._timers.append(self.reactor.callLater(self.seconds, end))

    async def _end(self, volume: str, call: Call) -> None:
        await self.forward(call)
        if call["Action"] == "ModifyVolume":
            self._modified.add(volume)
        self._states.pop(volume, None)

    def _shown(self, body: bytes) -> bytes:
        """Return an answer of moto's with the volumes' real states."""
        answer = parsed(body)
        for volume in [answer, *answer.iter(f"{_NS}item")]:
            state = self._states.get(text_of(volume, "volumeId"))
            where = "attachmentSet/item/status" if state in ("attaching", "detaching") else "status"
            element = volume.find(path(where))
            if state not in (None, "modifying") and element is not None and text_of(volume, "size"):
                element.text = state
        return ElementTree.tostring(answer)

    def _aged(self, body: bytes) -> bytes:
        answer = parsed(body)
        [made] = answer.iter(f"{_NS}createTime")
        since = datetime.fromisoformat(made.text or "") - timedelta(seconds=self.age)
        made.text = since.isoformat()
        return ElementTree.tostring(answer)

    def _modifications(self, volume: str, action: str, name: str) -> bytes:
        state = "modifying" if self._states.get(volume) == "modifying" else "optimizing"
        growth = self._growths.get(volume)
        inner = f"<{name}>{growth.described(state)}</{name}>" if growth is not None else ""
        if action == "DescribeVolumesModifications":
            known = self._states.get(volume) == "modifying" or volume in self._modified
            inner = f"<volumeModificationSet>{inner if known else ''}</volumeModificationSet>"
        return f'<{action}Response xmlns="{NAMESPACE}">{_REQUEST}{inner}</{action}Response>'.encode()

    # ---- What moto has

    async def _volume(self, id: str) -> ElementTree.Element:
        return await self._one("DescribeVolumes", "VolumeId", id, "volumeSet", "InvalidVolume.NotFound")

    async def _instance(self, id: str) -> ElementTree.Element:
        found = await self._one(
            "DescribeInstances", "InstanceId", id, "reservationSet", "InvalidInstanceID.NotFound"
        )
        [instance] = found.findall(path("instancesSet/item"))
        return instance

    async def _one(self, action: str, key: str, id: str, where: str, missing: str) -> ElementTree.Element:
        status, body = await self.forward({"Action": action, f"{key}.1": id, **_VERSION})
        found = parsed(body).find(path(f"{where}/item")) if status == 200 else None
        if found is None:
            raise Refusal(missing, f"The {key} '{id}' does not exist")
        return found


@attrs.frozen
class _Growth:
    """A volume becomes larger. Sizes are in GiB."""

    volume: str
    size: str
    target: str
    type: str
    iops: str  # "": it has none of its own
    started: str

    def described(self, state: str) -> str:
        """EC2's XML of it."""
        both = {"Size": (self.size, self.target), "VolumeType": (self.type,) * 2, "Iops": (self.iops,) * 2}
        fields = {"volumeId": self.volume, "modificationState": state, "startTime": self.started}
        for name, (before, after) in both.items():
            fields |= {f"original{name}": before, f"target{name}": after}
        fields["progress"] = "0" if state == "modifying" else "50"
        return "".join(f"<{name}>{text}</{name}>" for name, text in fields.items() if text)


def _detaching(volume: ElementTree.Element, instance: str) -> bytes:
    """Return the answer to DetachVolume. :param instance: the one to detach from; "": the one that has it."""
    [held, *_] = [
        each
        for each in volume.findall(path("attachmentSet/item"))
        if instance in ("", text_of(each, "instanceId"))
    ]
    fields = {name: text_of(held, name) for name in ("volumeId", "instanceId", "device", "attachTime")}
    inner = "".join(f"<{name}>{text}</{name}>" for name, text in fields.items())
    status = "<status>detaching</status>"
    return (
        f'<DetachVolumeResponse xmlns="{NAMESPACE}">{_REQUEST}{inner}{status}</DetachVolumeResponse>'.encode()
    )


def parsed(body: bytes) -> ElementTree.Element:
    """An answer of EC2's."""
    return ElementTree.fromstring(body)  # noqa: S314 (moto's own)


def path(names: str) -> str:
    """A path of EC2's names."""
    return "/".join(_NS + name for name in names.split("/"))


def text_of(element: ElementTree.Element, names: str) -> str:
    """The text at a path of EC2's names; "" where there is none."""
    found = element.find(path(names))
    return (found.text or "") if found is not None else ""
