# SPDX-License-Identifier: Apache-2.0
"""Executables that VMs fetch by URL, for the systemd container provider.

kubelet only accepts Docker's references as image names, so a URL is written as one:

    systemd.infranetes.io/HOST/PATH@sha256:HEX
    systemd.infranetes.io/HOST__PORT/PATH@sha256:HEX

A reference can't have upper-case letters and many other characters. For such paths the pod has the whole URL
in an annotation, where the checksum can be, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from twisted.internet.defer import Deferred, fail, succeed
from zope.interface import implementer

from infranetes.images.interface import CatalogueImage, IImageCatalogue
from infranetes_common.errors import InfranetesError, InvalidArgument

DOMAIN = "systemd.infranetes.io"
URL_ANNOTATION = "infranetes.io/executable-url"
SUM_ANNOTATION = "infranetes.io/executable-sha256"
MAX_URL = 4096
_REFERENCE = re.compile(
    rf"(?:{re.escape(DOMAIN)}/|systemd://|https://)(?P<where>[!-~]+?)(?:@sha256:(?P<sum>[0-9a-f]{{64}}))?"
)
_SUM = re.compile(r"(?:sha256:)?([0-9a-f]{64})")
_HOST = re.compile(r"(?P<host>[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?)(?:(?:__|:)(?P<port>[0-9]{1,5}))?")
_TAG = re.compile(r":[A-Za-z0-9_][A-Za-z0-9_.-]*$")


@implementer(IImageCatalogue)
class Executables:
    """See `IImageCatalogue`. Nothing is fetched here: the VMs do that."""

    name = "systemd"
    machine_images = False

    def find(self, reference: str, annotations: Mapping[str, str]) -> Deferred[CatalogueImage]:
        try:
            return succeed(parse(reference, annotations))
        except InfranetesError as error:
            return fail(error)

    def canonical(self, reference: str) -> str:
        return reference

    def present(self, image: CatalogueImage) -> Deferred[bool]:
        return succeed(True)


def parse(reference: str, annotations: Mapping[str, str]) -> CatalogueImage:
    """Return the executable that a reference means.

    :raise InvalidArgument: the reference or an annotation is wrong; the message says how.
    """

    def refuse(why: str) -> InvalidArgument:
        return InvalidArgument(
            f"image {reference[:300]!r}: {why}; write {DOMAIN}/HOST/PATH@sha256:HEX, and what can't be "
            f"written so in the pod's annotations {URL_ANNOTATION} and {SUM_ANNOTATION}"
        )

    parts = _REFERENCE.fullmatch(reference)
    if parts is None or len(reference) > MAX_URL:
        raise refuse("not the reference of an executable")
    given = annotations.get(SUM_ANNOTATION, "")
    listed = _SUM.fullmatch(given)
    if given and listed is None:
        raise InvalidArgument(f"annotation {SUM_ANNOTATION}: {given[:80]!r} is not 64 hex digits")
    checksum = parts["sum"] or (listed[1] if listed else "")
    if not checksum:
        raise refuse("it has no checksum")
    if parts["sum"] and listed and listed[1] != parts["sum"]:
        raise InvalidArgument(
            f"annotation {SUM_ANNOTATION}: another checksum than image {reference[:300]!r} has"
        )
    where = parts["where"] if parts["sum"] else _TAG.sub("", parts["where"])
    url = annotations.get(URL_ANNOTATION, "")
    if url:
        _check(url)
    else:
        host, slash, path = where.partition("/")
        known = _HOST.fullmatch(host)
        if known is None or not slash or not path or int(known["port"] or 1) not in range(1, 65536):
            raise refuse("no host and path")
        url = f"https://{known['host']}{':' + known['port'] if known['port'] else ''}/{path}"
    name = f"{DOMAIN}/{where}".replace(":", "__")
    return CatalogueImage(id=f"sha256:{checksum}", digests=(f"{name}@sha256:{checksum}",), url=url)


def _check(url: str) -> None:
    try:
        parts = urlsplit(url)
        fine = parts.scheme == "https" and bool(parts.hostname) and parts.username is None and parts.port != 0
    except ValueError:
        fine = False
    if not fine or len(url) > MAX_URL or not url.isascii() or not url.isprintable() or " " in url:
        raise InvalidArgument(f"annotation {URL_ANNOTATION}: not an https URL without credentials")
