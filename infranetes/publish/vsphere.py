# SPDX-License-Identifier: Apache-2.0
"""Images of vSphere: an item of the content library, and the template that is deployed from it.

An item is known by its name and by the publication in its description:

item                 then
none                 make it, without content
ours, no content     make the VMDK beside the disk; put it and the OVF into the item
ours, with content   have it deployed into image_folder as a pull would be, which takes up what was begun
another of its name  refused
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from http.client import HTTPException
from pathlib import Path
from typing import Protocol

from infranetes.providers.cloud.interface import CloudError, ErrorKind
from infranetes.providers.cloud.vsphere.errors import classify
from infranetes.publish.interface import CloudImage, Publication, Published, Report
from infranetes.publish.progress import readable
from infranetes.publish.vsphere_library import Shelf, StoredItem
from infranetes.publish.vsphere_ovf import envelope
from infranetes_common.commands import Command, thd_check
from infranetes_common.errors import AlreadyExists, InfranetesError, PermissionDenied, Unavailable

_MARK = "Published by Infranetes"  # begins descriptions; the kind and the publication's key follow
_DEPLOY_SECONDS = 2 * 3600.0


class Deploy(Protocol):
    """Ensures that image_folder has a template of the library's item NAME-VERSION.

    :raise Unavailable: it is being deployed."""

    def __call__(self, name: str, version: str) -> None: ...


class VspherePublisher:
    """See `ImagePublisher`.

    :param folder: image_folder. :param configured: the configuration's image. :param end: ends the sessions.
    """

    cloud = "vsphere"

    def __init__(
        self,
        shelf: Callable[[], Shelf],
        deploy: Deploy,
        folder: str,
        configured: str = "",
        end: Callable[[], None] = lambda: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._shelf, self._deploy, self._folder = shelf, deploy, folder
        self._configured, self._end, self._sleep = configured, end, sleep

    def close(self) -> None:
        self._end()

    # ---- Publishing

    def publish(self, publication: Publication, report: Report) -> Published:
        label = publication.label
        name, _, version = (label.name or f"infranetes-{label.kind}:{publication.key[:12]}").rpartition(":")
        title = f"{name}-{version}"
        vmdk = publication.disk.path.with_name(f"{publication.disk.path.name}.{publication.key[:12]}.vmdk")
        with _explained("publish the image"):
            shelf = self._shelf()
            item = self._item(shelf, title, publication)
            if not any(file.endswith(".ovf") for file in item.files):
                self._fill(shelf, item, publication, vmdk, report)
            vmdk.unlink(missing_ok=True)
            self._have_template(name, version, report)
        image = f"{self._folder}/{title}"
        settings = {} if label.name else {"image": image}
        return Published(self.cloud, image, title, label.name, settings)

    def _item(self, shelf: Shelf, title: str, publication: Publication) -> StoredItem:
        described = f"{_MARK}: {publication.label.kind} {publication.key}"
        there = shelf.named(title)
        for item in there:
            if item.description == described:
                return item
        if there:
            raise AlreadyExists(
                f"the library has another item {title}: give each change of an image a version of its own, "
                f"or remove that item with its template"
            )
        return StoredItem(shelf.create(title, described), title, described, "")

    def _fill(
        self, shelf: Shelf, item: StoredItem, publication: Publication, vmdk: Path, report: Report
    ) -> None:
        disk = publication.disk
        if not vmdk.exists():
            _convert(disk.path, vmdk, report)
        described = envelope(publication.title, "disk.vmdk", vmdk.stat().st_size, disk.size)
        shelf.fill(item.id, (f"{publication.title}.ovf", described), ("disk.vmdk", vmdk), report)
        report(f"item {item.name} is in the library")

    def _have_template(self, name: str, version: str, report: Report) -> None:
        begun = told = time.monotonic()
        while True:
            try:
                self._deploy(name, version)
                return
            except Unavailable as error:
                now = time.monotonic()
                if now > begun + _DEPLOY_SECONDS:
                    raise
                if now - told >= 30:
                    told = now
                    report(f"{error}, {now - begun:.0f} s")
            self._sleep(2.0)

    # ---- Old ones

    def images(self) -> list[CloudImage]:
        with _explained("list the images"):
            found = [each for each in self._shelf().items() if each.description.startswith(_MARK)]
        shown = [self._shown(each) for each in found]
        return sorted(shown, key=lambda each: (-each.created, each.id))

    def _shown(self, item: StoredItem) -> CloudImage:
        kind = item.description.removeprefix(f"{_MARK}: ").partition(" ")[0]
        is_configured = f"{self._folder}/{item.name}" == self._configured
        used = "the configuration names its template" if is_configured else ""
        name = item.name if kind == "machine" else ""
        return CloudImage(item.id, item.name, kind, name, _seconds(item.created), used_by=used)

    def remove(self, image: CloudImage) -> None:
        """Remove the item. Its template stays: pods' VMs share its disk."""
        with _explained(f"remove image {image.title}"):
            self._shelf().delete(image.id)


def _convert(disk: Path, vmdk: Path, report: Report) -> None:
    """Make the VMDK that libraries take of a raw disk."""
    begun = time.monotonic()
    work = vmdk.with_name(vmdk.name + ".new")
    options = ("-f", "raw", "-O", "vmdk", "-o", "subformat=streamOptimized,adapter_type=lsilogic")
    try:
        thd_check(
            Command(["qemu-img", "convert", *options, str(disk.absolute()), str(work.absolute())], None)
        )
        work.replace(vmdk)
    finally:
        work.unlink(missing_ok=True)
    report(f"{disk} was converted to {readable(vmdk.stat().st_size)} in {time.monotonic() - begun:.0f} s")


def _seconds(moment: str) -> float:
    try:
        return datetime.fromisoformat(moment).timestamp()
    except (ValueError, OverflowError):
        return 0.0


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Translate vCenter's errors into words that explain them. :raise InfranetesError: one of vCenter's."""
    try:
        yield
    except (CloudError, HTTPException, ssl.SSLError, ConnectionError, TimeoutError) as error:
        found = classify(error) or CloudError(ErrorKind.TRANSIENT, f"no answer: {error}")
        words = f"can't {what}: {found}"
        if found.kind is ErrorKind.CREDENTIALS:
            raise PermissionDenied(
                f"{words}; allow it to the publishing account, as docs/provider-vsphere.md says"
            ) from error
        if found.kind in (ErrorKind.TRANSIENT, ErrorKind.THROTTLED):
            raise Unavailable(f"{words}; run the command again, which goes on from there") from error
        raise InfranetesError(words) from error
