# SPDX-License-Identifier: Apache-2.0
"""EBS' direct APIs over HTTP. moto's accept any checksum, know no client tokens, and leave a volume behind
for each snapshot. Here moto only has the snapshot.

Source: EBS direct APIs reference, and "Ensure idempotency in StartSnapshot API requests".
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from twisted.internet.interfaces import IDelayedCall
from twisted.internet.threads import deferToThread

from tests.support.clouds.aws import SimulatedAws
from tests.support.clouds.faults import FaultKind
from tests.support.clouds.http_sites import Answer, Answering, ClosableSite
from tests.support.clouds.moto import REGION

POLICY = Path(__file__).resolve().parents[3] / "docs" / "publish-aws-policy.json"
BLOCK = 512 * 1024
_PATHS = (
    ("POST", re.compile(r"/snapshots"), "StartSnapshot"),
    ("PUT", re.compile(r"/snapshots/(snap-[0-9a-f]+)/blocks/(\d+)"), "PutSnapshotBlock"),
    ("POST", re.compile(r"/snapshots/completion/(snap-[0-9a-f]+)"), "CompleteSnapshot"),
)


class Refusal(Exception):
    """A refusal: status, error and message."""


class SimulatedEbs:
    """The direct APIs of one test's account.

    :param world: EC2, whose faults are these APIs' too.
    :ivar requests: their names, in order. :ivar blocks: of each snapshot, by their numbers.
    :ivar unknown: how often a snapshot is not known yet.
    :ivar sealing: for how many seconds a snapshot stays pending once it is complete.
    :ivar after: called with each request's name when it has had its effect.
    """

    def __init__(self, reactor: Any, world: SimulatedAws) -> None:
        self._reactor, self._world = reactor, world
        self.requests: list[str] = []
        self.blocks: dict[str, dict[int, bytes]] = {}
        self.tags: dict[str, dict[str, str]] = {}
        self.sealing = 0.05
        self.unknown = 0
        self.after: Callable[[str], None] = lambda name: None
        self._tokens: dict[str, tuple[Any, str]] = {}
        self._sealed: set[str] = set()
        self._timers: list[IDelayedCall] = []
        self._site = ClosableSite(Answering(self._answer, "application/json"))

    def start(self) -> None:
        """Start to serve."""
        self._port = self._reactor.listenTCP(0, self._site, interface="127.0.0.1")
        self.endpoint = f"http://127.0.0.1:{self._port.getHost().port}"

    async def stop(self) -> None:
        """Stop, and remove all snapshots."""
        for timer in self._timers:
            if timer.active():
                timer.cancel()
        await self._port.stopListening()
        await self._site.close_connections()
        await deferToThread(self._thd_remove_all)

    def _thd_remove_all(self) -> None:
        made = [{"Name": "image-id", "Values": list(self._world.images.registered) or ["ami-0"]}]
        for image in self._world.ec2.describe_images(Owners=["self"], Filters=made)["Images"]:
            self._world.ec2.deregister_image(ImageId=image["ImageId"])
        for each in self.snapshots():
            self._world.ec2.delete_snapshot(SnapshotId=each["SnapshotId"])

    def snapshots(self) -> list[Any]:
        """Those that exist, as EC2 describes them."""
        ours = [{"Name": "snapshot-id", "Values": list(self.blocks) or ["snap-0"]}]
        found: list[Any] = self._world.ec2.describe_snapshots(OwnerIds=["self"], Filters=ours)["Snapshots"]
        return found

    def cancel(self, id: str) -> None:
        """End a snapshot whose upload was not continued in time."""
        self._world.snapshots.states[id] = "error"

    def content(self, id: str, size: int) -> bytes:
        """Return the content of a disk made from a snapshot."""
        return b"".join(self.blocks[id].get(n, bytes(BLOCK)) for n in range(-(-size // BLOCK)))[:size]

    async def _answer(self, request: Any) -> Answer:
        path, method = request.path.decode(), request.method.decode()
        for verb, pattern, name in _PATHS:
            match = pattern.fullmatch(path)
            if match is None or verb != method:
                continue
            self.requests.append(name)
            fault = self._world.faults.befalling({"Action": name})
            kind = fault.kind if fault is not None else None
            if kind is FaultKind.ERROR:
                return 503, b'{"Message": "busy"}', ("x-amzn-ErrorType", "InternalServerException")
            try:
                headers = {key.decode().lower(): b"".join(v).decode() for key, v in _headers(request)}
                serve = getattr(self, f"_{name}")
                status, answer = await serve(match.groups(), headers, request.content.read())
            except Refusal as refusal:
                status, code, words = refusal.args
                return status, json.dumps({"Message": words}).encode(), ("x-amzn-ErrorType", code)
            self.after(name)
            if kind is FaultKind.LOST:
                raise ConnectionError
            return status, json.dumps(answer).encode()
        return 404, b"{}"

    async def _StartSnapshot(self, path: Any, headers: Mapping[str, str], content: bytes) -> tuple[int, Any]:
        asked = json.loads(content)
        token, tags = asked["ClientToken"], {tag["Key"]: tag["Value"] for tag in asked["Tags"]}
        self._check_allowed("StartSnapshot", {f"aws:RequestTag/{key}": tags[key] for key in tags})
        if len(token) > 64 or not 10 <= asked["Timeout"] <= 4320:
            raise Refusal(400, "ValidationException", "Invalid request")
        if token in self._tokens:
            before, id = self._tokens[token]
            if before != asked:
                raise Refusal(409, "ConflictException", "The client token was used before")
        else:
            id = await deferToThread(self._thd_snapshot, asked)
            self._tokens[token] = (asked, id)
            self.blocks[id], self.tags[id] = {}, tags
            self._world.snapshots.states[id] = "pending"
        answer = {"SnapshotId": id, "Status": "pending", "BlockSize": BLOCK}
        return 201, {**answer, "VolumeSize": asked["VolumeSize"]}

    def _thd_snapshot(self, asked: Any) -> str:
        ec2 = self._world.ec2
        volume = ec2.create_volume(Size=asked["VolumeSize"], AvailabilityZone=f"{REGION}a")["VolumeId"]
        tagged = [{"ResourceType": "snapshot", "Tags": asked["Tags"]}]
        words = asked.get("Description", "")
        made = ec2.create_snapshot(VolumeId=volume, Description=words, TagSpecifications=tagged)
        ec2.delete_volume(VolumeId=volume)
        return str(made["SnapshotId"])

    async def _PutSnapshotBlock(
        self, path: Any, headers: Mapping[str, str], content: bytes
    ) -> tuple[int, Any]:
        id, number = path
        if self.unknown > 0:
            self.unknown -= 1
            raise Refusal(404, "ResourceNotFoundException", f"The snapshot '{id}' does not exist.")
        self._check_pending(id)
        self._check_allowed("PutSnapshotBlock", {f"aws:ResourceTag/{k}": v for k, v in self.tags[id].items()})
        checksum = base64.b64encode(hashlib.sha256(content).digest()).decode()
        if len(content) != BLOCK or headers.get("x-amz-data-length") != str(BLOCK):
            raise Refusal(400, "ValidationException", "Invalid block size")
        if (headers.get("x-amz-checksum"), headers.get("x-amz-checksum-algorithm")) != (checksum, "SHA256"):
            raise Refusal(400, "ValidationException", "Checksum mismatch")
        self.blocks[id][int(number)] = content
        return 201, {"Checksum": checksum, "ChecksumAlgorithm": "SHA256"}

    async def _CompleteSnapshot(
        self, path: Any, headers: Mapping[str, str], content: bytes
    ) -> tuple[int, Any]:
        [id] = path
        self._check_pending(id)
        self._check_allowed("CompleteSnapshot", {f"aws:ResourceTag/{k}": v for k, v in self.tags[id].items()})
        blocks = self.blocks[id]
        digests = b"".join(hashlib.sha256(blocks[number]).digest() for number in sorted(blocks))
        linear = base64.b64encode(hashlib.sha256(digests).digest()).decode()
        if headers.get("x-amz-changedblockscount") != str(len(blocks)):
            raise Refusal(400, "ValidationException", "The number of blocks is wrong")
        if (headers.get("x-amz-checksum"), headers.get("x-amz-checksum-aggregation-method")) != (
            linear,
            "LINEAR",
        ):
            raise Refusal(400, "ValidationException", "The aggregated checksum is wrong")
        pop = self._world.snapshots.states.pop
        self._timers.append(self._reactor.callLater(self.sealing, pop, id, None))
        self._sealed.add(id)
        return 202, {"Status": "pending"}

    def _check_pending(self, id: str) -> None:
        if id in self._sealed or self._world.snapshots.states.get(id) != "pending":
            raise Refusal(400, "ValidationException", f"The snapshot {id} is not pending")

    def _check_allowed(self, action: str, keys: Mapping[str, str]) -> None:
        for statement in json.loads(POLICY.read_text())["Statement"]:
            actions = statement["Action"]
            allowed = [actions] if isinstance(actions, str) else actions
            wanted = statement.get("Condition", {}).get("StringEquals", {}).items()
            if f"ebs:{action}" in allowed and all(keys.get(key) == value for key, value in wanted):
                return
        raise Refusal(403, "AccessDeniedException", f"not authorized to perform: ebs:{action}")


def _headers(request: Any) -> Any:
    return request.requestHeaders.getAllRawHeaders()
