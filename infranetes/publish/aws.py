# SPDX-License-Identifier: Apache-2.0
"""Images of EC2: a snapshot that is written block by block, and registered.

EBS' direct APIs take the blocks, so that neither a bucket nor a role for VM import is needed. libcloud has no
calls for them, and its `ex_register_image` knows neither a boot mode nor IMDSv2: botocore makes all calls.

A publication's snapshot is found by its tag, and its image by its name, which EC2 has once:

snapshot       then
none, `error`  delete it; StartSnapshot, with a new token that the journal has before EBS has it
pending        put the blocks that the journal lacks; CompleteSnapshot; wait until it is completed
completed      RegisterImage, unless the image is there; tag it; wait until it is available

CompleteSnapshot is refused when it is asked for again: whether it had been asked for shows in what becomes
of the snapshot.

A snapshot that is not continued ends by itself: EBS cancels it an hour after the last block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from datetime import datetime
from functools import partial
from itertools import islice

from botocore.exceptions import ClientError

from infranetes.providers.cloud.aws.images import NAME, OURS
from infranetes.publish.aws_clients import Ebs, Ec2, Filter, ImageShown, SnapshotShown, tags_of, to_tags
from infranetes.publish.aws_errors import explained, is_code
from infranetes.publish.interface import MACHINE, CloudImage, Publication, Published, Report
from infranetes.publish.journal import Journal
from infranetes.publish.plan import BLOCK, DiskPlan, in_base64, read_block
from infranetes.publish.progress import UploadProgress
from infranetes_common.errors import FailedPrecondition, InfranetesError, Unavailable

KEY, KIND = "infranetes-publication", "infranetes-kind"  # tags of snapshots and images
ROOT_DEVICE = "/dev/xvda"
PARALLEL = 16
UNKNOWN_SECONDS = 150.0  # how long EBS may not know a snapshot that it has just begun
WAIT_SECONDS = 1800.0
SEALED_SECONDS = 300.0  # how long a refused completion may mean that the snapshot is being completed
CANCEL_MINUTES = 60


class AwsPublisher:
    """See `ImagePublisher`.

    :param protected: the image that the configuration names. :param boot_mode: of instances."""

    cloud = "aws"

    def __init__(
        self,
        ec2: Ec2,
        ebs: Ebs,
        protected: str = "",
        boot_mode: str = "legacy-bios",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._ec2, self._ebs, self._protected, self._boot_mode = ec2, ebs, protected, boot_mode
        self._clock, self._sleep = clock, sleep

    def close(self) -> None:
        """Do nothing: botocore's connections end with the process."""

    # ---- Publishing

    def publish(self, publication: Publication, report: Report) -> Published:
        journal = Journal(publication.disk.path, self.cloud, publication.key)
        with explained("publish the image"):
            image = self._named(publication.title)
            if image is None:
                snapshot = self._snapshot(publication, journal, report)
                image = self._register(publication, snapshot, report)
            id = image["ImageId"]
            tags = _tags(publication)
            if tags.items() - tags_of(image).items():
                self._ec2.create_tags(Resources=[id], Tags=to_tags(tags))
            self._wait_available(id, report)
            journal.forget()
        label = publication.label
        return Published(self.cloud, id, publication.title, label.name, {} if label.name else {"image": id})

    def _snapshot(self, publication: Publication, journal: Journal, report: Report) -> str:
        """Return the id of the publication's completed snapshot."""
        disk = publication.disk
        id, state = self._begun(publication, journal, report)
        if state == "completed":
            return id
        self._put(disk, id, journal, report)
        refusal = None
        try:
            self._ebs.complete_snapshot(
                SnapshotId=id,
                ChangedBlocksCount=len(disk.digests),
                Checksum=disk.linear_checksum,
                ChecksumAlgorithm="SHA256",
                ChecksumAggregationMethod="LINEAR",
            )
        except ClientError as error:
            if not is_code(error, "ValidationException"):
                raise
            refusal = error
        self._wait_completed(id, journal, report, refusal)
        return id

    def _begun(self, publication: Publication, journal: Journal, report: Report) -> tuple[str, str]:
        """Return the id and state of the snapshot to go on with."""
        usable = []
        for snapshot in self._of_key(publication.key):
            id, state = snapshot["SnapshotId"], snapshot["State"]
            if state == "error":
                self._ec2.delete_snapshot(SnapshotId=id)
            elif state in ("pending", "completed"):
                usable.append((state, id))
        if usable:
            state, id = min(usable)  # completed ones first
            journal.placed(id)
            report(f"going on with snapshot {id}, which is {state}")
            return id, state
        if journal.target is not None and journal.target.place:
            journal.forget()  # its snapshot is gone
        begun = self._ebs.start_snapshot(
            VolumeSize=publication.disk.gib,
            ClientToken=journal.begin().token,
            Description=publication.title,
            Tags=to_tags(_tags(publication)),
            Timeout=CANCEL_MINUTES,
        )
        id, size = begun["SnapshotId"], begun["BlockSize"]
        if size != BLOCK:
            self._ec2.delete_snapshot(SnapshotId=id)
            raise FailedPrecondition(
                f"EBS requires blocks of {size} bytes, and this release supports {BLOCK} only"
            )
        journal.placed(id)
        report(f"snapshot {id} was begun")
        return id, "pending"

    def _put(self, disk: DiskPlan, id: str, journal: Journal, report: Report) -> None:
        """Send the blocks that the snapshot lacks."""
        missing = [block for block in disk.digests if str(block) not in journal.parts]
        sent = (len(disk.digests) - len(missing)) * BLOCK
        progress = UploadProgress(f"upload to {id}", len(disk.digests) * BLOCK, report, sent)
        known_by = self._clock() + UNKNOWN_SECONDS
        with disk.path.open("rb", buffering=0) as file, ThreadPoolExecutor(PARALLEL) as pool:
            todo = iter(missing)
            running: dict[Future[None], int] = {}

            def send_more() -> None:
                for block in islice(todo, 2 * PARALLEL - len(running)):
                    future = pool.submit(self._put_block, disk, id, file.fileno(), block, known_by)
                    running[future] = block

            send_more()
            while running:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    block = running.pop(future)
                    if (error := future.exception()) is not None:
                        pool.shutdown(wait=False, cancel_futures=True)
                        raise error
                    journal.add(str(block))
                    progress.add(BLOCK)
                send_more()

    def _put_block(self, disk: DiskPlan, id: str, number: int, block: int, known_by: float) -> None:
        data = read_block(number, block)
        while True:
            try:
                self._ebs.put_snapshot_block(
                    SnapshotId=id,
                    BlockIndex=block,
                    BlockData=data,
                    DataLength=BLOCK,
                    # The digest is from the scan of the disk: EBS refuses a block that has changed since.
                    Checksum=in_base64(disk.digests[block]),
                    ChecksumAlgorithm="SHA256",
                )
                return
            except ClientError as error:
                if not is_code(error, "ResourceNotFoundException") or self._clock() > known_by:
                    raise
            self._sleep(2.0)

    def _wait_completed(self, id: str, journal: Journal, report: Report, refusal: ClientError | None) -> None:
        """:param refusal: of its completion, which may have been asked for before."""
        refused_at = self._clock()
        for _ in self._looks(f"snapshot {id}", "completed", report):
            found = self._ec2.describe_snapshots(
                OwnerIds=["self"], Filters=[{"Name": "snapshot-id", "Values": [id]}]
            )["Snapshots"]
            state = found[0]["State"] if found else "pending"  # not known everywhere yet
            if state == "completed":
                return
            if refusal is not None and self._clock() > refused_at + SEALED_SECONDS:
                raise refusal
            if state == "error":
                words = found[0].get("StateMessage") or "EBS gives no reason"
                journal.forget()
                raise InfranetesError(f"snapshot {id} has failed: {words}; run the command again")

    # ---- Images

    def _register(self, publication: Publication, snapshot: str, report: Report) -> ImageShown:
        disk = {"SnapshotId": snapshot, "VolumeType": "gp3", "DeleteOnTermination": True}
        try:
            id = self._ec2.register_image(
                Name=publication.title,
                Description=publication.label.name or f"pods of containers by {publication.label.kind}",
                Architecture="x86_64",
                VirtualizationType="hvm",
                BootMode=self._boot_mode,
                EnaSupport=True,
                ImdsSupport="v2.0",
                RootDeviceName=ROOT_DEVICE,
                BlockDeviceMappings=[{"DeviceName": ROOT_DEVICE, "Ebs": disk}],
            )["ImageId"]
        except ClientError as error:
            there = self._named(publication.title) if is_code(error, "InvalidAMIName.Duplicate") else None
            if there is None:
                raise
            return there  # the answer to an earlier request was lost
        report(f"image {id} was registered")
        return {"ImageId": id, "State": "pending"}

    def _wait_available(self, id: str, report: Report) -> None:
        for _ in self._looks(f"image {id}", "available", report):
            found = self._ec2.describe_images(
                Owners=["self"], Filters=[{"Name": "image-id", "Values": [id]}]
            )["Images"]
            state = found[0]["State"] if found else "pending"
            if state == "available":
                return
            if state in ("failed", "error", "invalid", "deregistered"):
                raise InfranetesError(
                    f"image {id} is {state}: remove it (`infranetes-guest images aws --remove {id}`), and "
                    f"run the command again"
                )

    def _named(self, title: str) -> ImageShown | None:
        found = self._ec2.describe_images(Owners=["self"], Filters=[{"Name": "name", "Values": [title]}])
        return found["Images"][0] if found["Images"] else None

    def _of_key(self, key: str) -> list[SnapshotShown]:
        wanted: list[Filter] = [{"Name": f"tag:{KEY}", "Values": [key]}]
        return self._ec2.describe_snapshots(OwnerIds=["self"], Filters=wanted)["Snapshots"]

    def _looks(self, what: str, until: str, report: Report) -> Iterator[None]:
        """Yield for each look at something that takes its time. :raise Unavailable: it takes too long."""
        begun = told = self._clock()
        pause = 1.0
        while (now := self._clock()) < begun + WAIT_SECONDS:
            if now - told >= 30:
                told = now
                report(f"{what} is not {until} yet, {now - begun:.0f} s")
            yield
            self._sleep(pause)
            pause = min(pause * 1.5, 15.0)
        raise Unavailable(
            f"{what} is not {until} after {WAIT_SECONDS:.0f} s: run the command again, which goes on waiting"
        )

    # ---- Old ones

    def images(self) -> list[CloudImage]:
        with explained("list the images"):
            wanted: list[Filter] = [{"Name": "tag-key", "Values": [KEY]}]
            shown = self._ec2.describe_images(Owners=["self"], Filters=wanted)["Images"]
            used = self._used([each["ImageId"] for each in shown])
            snapshots = self._ec2.describe_snapshots(OwnerIds=["self"], Filters=wanted)["Snapshots"]
        found = [_cloud_image(each, used.get(each["ImageId"], "")) for each in shown]
        parts = {part for image in found for part in image.parts}
        found += [_left_over(each) for each in snapshots if each["SnapshotId"] not in parts]
        return sorted(found, key=lambda each: (-each.created, each.id))

    def _used(self, ids: list[str]) -> Mapping[str, str]:
        """Return the reasons why images are kept, by their ids."""
        used = {self._protected: "the configuration names it"} if self._protected else {}
        if ids:
            states = ["pending", "running", "stopping", "stopped"]
            filters: list[Filter] = [
                {"Name": "image-id", "Values": ids},
                {"Name": "instance-state-name", "Values": states},
            ]
            token: dict[str, str] = {}
            while True:
                page = self._ec2.describe_instances(Filters=filters, **token)
                for instance in (one for each in page["Reservations"] for one in each["Instances"]):
                    used.setdefault(instance["ImageId"], f"instance {instance['InstanceId']} uses it")
                if not page.get("NextToken"):
                    break
                token = {"NextToken": page["NextToken"]}
        return used

    def remove(self, image: CloudImage) -> None:
        with explained(f"remove image {image.id}"):
            if image.id not in image.parts:
                _unless_missing(partial(self._ec2.deregister_image, ImageId=image.id))
            for snapshot in image.parts:
                _unless_missing(partial(self._ec2.delete_snapshot, SnapshotId=snapshot))


def _unless_missing(call: Callable[[], object]) -> None:
    try:
        call()
    except ClientError as error:
        if not is_code(
            error, "InvalidAMIID.NotFound", "InvalidAMIID.Unavailable", "InvalidSnapshot.NotFound"
        ):
            raise


def _tags(publication: Publication) -> dict[str, str]:
    label = publication.label
    tags = {OURS: "true", KEY: publication.key, KIND: label.kind, "Name": publication.title}
    return {**tags, NAME: label.name} if label.kind == MACHINE else tags


def _cloud_image(shown: ImageShown, used_by: str) -> CloudImage:
    tags = tags_of(shown)
    disks = [each.get("Ebs", {}) for each in shown.get("BlockDeviceMappings", [])]
    return CloudImage(
        id=shown["ImageId"],
        title=shown.get("Name", ""),
        kind=tags.get(KIND, ""),
        name=tags.get(NAME, ""),
        created=datetime.fromisoformat(shown["CreationDate"]).timestamp(),
        parts=[str(disk["SnapshotId"]) for disk in disks if "SnapshotId" in disk],
        used_by=used_by,
    )


def _left_over(shown: SnapshotShown) -> CloudImage:
    """Return a snapshot of which no image was made, as an image without one."""
    tags, id = tags_of(shown), shown["SnapshotId"]
    is_pending = shown["State"] == "pending"
    return CloudImage(
        id=id,
        title=tags.get("Name", ""),
        kind=tags.get(KIND, ""),
        name=tags.get(NAME, ""),
        created=shown["StartTime"].timestamp(),
        parts=[id],
        used_by="it is being written" if is_pending else "",
    )
