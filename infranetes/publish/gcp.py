# SPDX-License-Identifier: Apache-2.0
"""Images of Compute Engine: an archive of the disk is put into a bucket, and imported.

An image's name is unique in its project, and has the publication's digest; so has the object's:

image    object        then
none     none          make the archive beside the disk; upload it by a session that the journal has
none     as archived   images.insert
PENDING  any           wait
FAILED   any           delete the image, and go on as if there were none
READY    any           delete the object and the archive
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import requests
from libcloud.common.google import GoogleBaseError

from infranetes.providers.cloud.calls import errors as cloud_errors
from infranetes.providers.cloud.calls.connections import close_session
from infranetes.providers.cloud.gcp import errors
from infranetes.providers.cloud.gcp.driver import Driver
from infranetes.providers.cloud.gcp.images import NAME, OURS, VERSION
from infranetes.providers.cloud.gcp.libcloud_types import Image
from infranetes.providers.cloud.gcp.names import filter_of, labels, last, value
from infranetes.providers.cloud.interface import CloudError, ErrorKind
from infranetes.publish.gcp_storage import Storage, md5_of
from infranetes.publish.interface import MACHINE, CloudImage, Publication, Published, Report
from infranetes.publish.journal import Journal
from infranetes.publish.plan import GIB, DiskPlan
from infranetes.publish.progress import readable
from infranetes_common.commands import Command, thd_check
from infranetes_common.errors import (
    InfranetesError,
    InvalidArgument,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)

KEY, KIND = "infranetes-publication", "infranetes-kind"  # labels
FEATURES = ("VIRTIO_SCSI_MULTIQUEUE", "GVNIC", "UEFI_COMPATIBLE", "SEV_SNP_CAPABLE")
WAIT_SECONDS = 1800.0


class GcpPublisher:
    """See `ImagePublisher`.

    :param storage: None: there is no bucket, and nothing can be published.
    :param zones: where disks of images are looked for. :param configured: the configuration's image.
    """

    cloud = "gcp"

    def __init__(
        self,
        driver: Driver,
        storage: Storage | None,
        zones: Sequence[str] = (),
        configured: str = "",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._driver, self._storage = driver, storage
        self._zones, self._configured = zones, configured
        self._clock, self._sleep = clock, sleep

    def close(self) -> None:
        close_session(self._driver)
        if self._storage is not None:
            self._storage.close()

    # ---- Publishing

    def publish(self, publication: Publication, report: Report) -> Published:
        storage, disk = self._storage, publication.disk
        if storage is None:
            raise InvalidArgument("gcp needs --bucket NAME, of Cloud Storage: images are imported from there")
        if disk.size % GIB:
            raise InvalidArgument(
                f"{disk.path} has {disk.size} bytes: Compute Engine takes disks of whole GiB"
            )
        journal = Journal(disk.path, self.cloud, publication.key)
        name, archive = f"{publication.title}.tar.gz", _archive_of(publication)
        with _explained("publish the image"):
            image = self._image(publication.title)
            if image is not None and image.get("status") == "FAILED":
                self._delete(publication.title)
                image = None
            if image is None:
                self._store(storage, disk, archive, name, journal, report)
                self._insert(publication, storage, name, report)
            self._wait_ready(publication.title, report)
            storage.delete(name)
            archive.unlink(missing_ok=True)
            journal.forget()
        id = f"projects/{self._driver.project}/global/images/{publication.title}"
        label = publication.label
        settings = {} if label.name else {"image": id}
        return Published(self.cloud, id, publication.title, label.name, settings)

    def _store(
        self, storage: Storage, disk: DiskPlan, archive: Path, name: str, journal: Journal, report: Report
    ) -> None:
        """Put the archive into the bucket, unless it is there."""
        if not archive.exists():
            _pack(disk, archive, report)
            journal.forget()  # any session was for an archive that is gone
        md5 = md5_of(archive)
        there = storage.find(name)
        if there is None or there.get("md5Hash") != md5:
            storage.upload(archive, name, journal, report)
            there = storage.find(name)
        if there is None or there.get("md5Hash") != md5:
            storage.delete(name)
            journal.forget()
            raise Unavailable(
                f"gs://{storage.bucket}/{name} differs from what was sent: run the command again"
            )

    def _insert(self, publication: Publication, storage: Storage, name: str, report: Report) -> None:
        kind, title = publication.label.kind, publication.title
        body = {
            "name": title,
            "description": publication.label.name or f"pods of containers by {kind}",
            "rawDisk": {"source": f"https://storage.googleapis.com/{storage.bucket}/{name}"},
            "architecture": "X86_64",
            "labels": _labels(publication),
            "guestOsFeatures": [{"type": each} for each in FEATURES],
            **({} if kind == MACHINE else {"family": f"infranetes-{kind}"}),
        }
        request = str(uuid.uuid4())  # of this attempt alone: after a failure there may be another
        try:
            operation = self._driver.insert_image(body, request)
        except GoogleBaseError as error:
            found = errors.classify(error)
            if found is None or found.kind is not ErrorKind.CONFLICT:
                raise
            return  # the answer to an earlier request was lost
        report(f"image {title} is being imported")
        self._wait_ended(operation["name"], f"the import of {title}", report)

    def _wait_ready(self, title: str, report: Report) -> None:
        for _ in self._looks(f"image {title}", report):
            image = self._image(title)
            state = image.get("status") if image is not None else "PENDING"  # not known everywhere yet
            if state == "READY":
                return
            if state == "FAILED":
                raise InfranetesError(f"Compute Engine could not import {title}: run the command again")

    def _wait_ended(self, operation: str, what: str, report: Report) -> None:
        """Wait for an operation's end. :raise GoogleBaseError: it has failed."""
        for _ in self._looks(what, report):
            found = self._driver.operation("", operation)
            if found is not None and found.get("status") == "DONE":
                return

    def _image(self, title: str) -> Image | None:
        return self._driver.image(f"projects/{self._driver.project}/global/images/{title}")

    def _looks(self, what: str, report: Report) -> Iterator[None]:
        """Yield for each look at something that takes its time. :raise Unavailable: it takes too long."""
        begun = told = self._clock()
        pause = 1.0
        while (now := self._clock()) < begun + WAIT_SECONDS:
            if now - told >= 30:
                told = now
                report(f"{what} goes on, {now - begun:.0f} s")
            yield
            self._sleep(pause)
            pause = min(pause * 1.5, 15.0)
        raise Unavailable(
            f"{what} has not ended after {WAIT_SECONDS:.0f} s: run the command again, which goes on waiting"
        )

    # ---- Old ones

    def images(self) -> list[CloudImage]:
        with _explained("list the images"):
            found = [
                each
                for each in self._driver.images(self._driver.project, filter_of({OURS: "true"}))
                if KEY in each.get("labels", {})
            ]
            used = self._used(found)
        shown = [_cloud_image(each, used.get(each["name"], "")) for each in found]
        return sorted(shown, key=lambda each: (-each.created, each.id))

    def _used(self, images: Sequence[Image]) -> dict[str, str]:
        """Return the reasons why images are kept, by their names."""
        used: dict[str, str] = {}
        for zone in self._zones if images else ():
            for disk in self._driver.zone_disks(zone, ""):
                used.setdefault(last(disk.get("sourceImage", "")), f"disk {disk['name']} in {zone} is of it")
        path, _, name = self._configured.rpartition("/")
        if path.endswith("family"):
            ready = [each for each in images if each.get("family") == name]
            name = max(ready, key=lambda each: each["creationTimestamp"])["name"] if ready else ""
        return {**used, name: "the configuration names it"}

    def remove(self, image: CloudImage) -> None:
        with _explained(f"remove image {image.title}"):
            self._delete(image.title)

    def _delete(self, title: str) -> None:
        operation = self._driver.delete_image(title)
        if operation is not None:
            self._wait_ended(operation["name"], f"the end of image {title}", lambda words: None)


def _archive_of(publication: Publication) -> Path:
    path = publication.disk.path
    return path.with_name(f"{path.name}.{publication.key[:12]}.tar.gz")


def _pack(disk: DiskPlan, archive: Path, report: Report) -> None:
    """Make the archive that Compute Engine imports: GNU tar's old format, with a sparse `disk.raw`."""
    begun = time.monotonic()
    work = archive.absolute().with_name(archive.name + ".new")
    command = [
        *("tar", "--create", "--sparse", "--format=oldgnu", "--gzip", f"--file={work}"),
        *("--owner=0", "--group=0", "--numeric-owner", "--mode=0644"),
        *(f"--directory={disk.path.absolute().parent}", "--transform=s|.*|disk.raw|", "--", disk.path.name),
    ]
    try:
        thd_check(Command(command, None))
        work.replace(archive)
    finally:
        work.unlink(missing_ok=True)
    size = readable(archive.stat().st_size)
    report(f"{disk.path} was packed to {size} in {time.monotonic() - begun:.0f} s")


def _labels(publication: Publication) -> dict[str, str]:
    label = publication.label
    found = {OURS: "true", KEY: publication.key, KIND: label.kind}
    if label.kind == MACHINE:
        found[NAME], _, found[VERSION] = label.name.rpartition(":")
    return labels(found)


def _cloud_image(image: Image, used_by: str) -> CloudImage:
    found = {key: value(each) for key, each in image.get("labels", {}).items()}
    created = datetime.fromisoformat(image["creationTimestamp"]).timestamp()
    name = f"{found[NAME]}:{found.get(VERSION, '')}" if NAME in found else ""
    return CloudImage(image["name"], image["name"], found.get(KIND, ""), name, created, used_by=used_by)


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Translate Google's errors into words that explain them. :raise InfranetesError: one of Google's."""
    try:
        yield
    except (GoogleBaseError, CloudError, requests.RequestException) as error:
        found = errors.classify(error) or cloud_errors.classify(error)
        words = f"can't {what}: {found}"
        if isinstance(error, CloudError) and found.kind is ErrorKind.CREDENTIALS:
            raise Unauthenticated(words) from error  # there is no token to ask Google with
        if found.kind is ErrorKind.CREDENTIALS:
            raise PermissionDenied(
                f"{words}; allow it to the publishing account, as docs/publish-gcp-role.yaml does"
            ) from error
        if found.kind in (ErrorKind.TRANSIENT, ErrorKind.THROTTLED):
            raise Unavailable(f"{words}; run the command again, which goes on from there") from error
        raise InfranetesError(words) from error
