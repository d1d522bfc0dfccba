# SPDX-License-Identifier: Apache-2.0
"""Names and labels for Compute Engine (source: "Naming resources" and "Labeling resources" of its manual)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

LABEL = r"[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?"  # RFC 1035: names of resources, network tags
ZONE = r"[a-z]+-[a-z]+[0-9]+-[a-z]"
PROJECT = r"(?:[a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]"
IMAGE = rf"(?:(?:projects/{PROJECT}/)?global/images/)?(?:family/)?{LABEL}"
NETWORK = rf"(?:projects/{PROJECT}/global/networks/)?{LABEL}"
SUBNETWORK = rf"(?:projects/{PROJECT}/regions/[a-z0-9-]+/subnetworks/)?{LABEL}"
KEY = (  # source: Cloud KMS, "Object hierarchy"
    rf"projects/{PROJECT}/locations/[a-z0-9-]+/keyRings/[A-Za-z0-9_-]{{1,63}}"
    r"/cryptoKeys/[A-Za-z0-9_-]{1,63}(?:/cryptoKeyVersions/[0-9]+)?"
)

_ID = re.compile(rf"([a-z][a-z0-9-]{{1,30}})\.({LABEL})")
_DISK = re.compile(rf"zones/([a-z0-9-]+)/disks/({LABEL})$")
_PLAIN = re.compile(r"[a-z0-9-]{1,63}")
_MOST = 63  # characters of a label's value
_ESCAPE = re.compile(r"_([0-9a-f]{2})")


def region_of(zone: str) -> str:
    """`europe-west1` of `europe-west1-b`."""
    return zone.rpartition("-")[0]


def name_of(token: str, number: int) -> str:
    """Return a VM's name. Names are unique in a zone, so it is the idempotency key, too."""
    return f"infranetes-{token}-{number}"


def hashed_name_of(cluster: str, name: str) -> str:
    """Return a valid name for a disk or snapshot of a cluster, which may give it any name."""
    digest = hashlib.sha256(f"{len(cluster)} {cluster} {name}".encode()).hexdigest()
    return f"infranetes-{digest[:40]}"


def id_of(zone: str, name: str) -> str:
    """Return the id of a VM or volume: its name is unique in its zone only."""
    return f"{zone}.{name}"


def is_id(text: str) -> bool:
    """Return whether `id_of` could have returned this."""
    return _ID.fullmatch(text) is not None


def is_in_a_zone(id: str) -> bool:
    """Return whether an id's zone could be a real one: people write volumes' ids, too."""
    return re.fullmatch(ZONE, split_id(id)[0]) is not None


def split_id(id: str) -> tuple[str, str]:
    """Return an id's zone and name."""
    zone, _, name = id.partition(".")
    return zone, name


def label(value: str) -> str:
    """Return `value` as a label, which may have lower-case letters, digits, `-` and `_` only.

    Different values have different labels: other characters are escaped as `_` and two hex digits, and what
    is then too long ends with `__` and its hash."""
    if _PLAIN.fullmatch(value):
        return value
    escaped = "".join(
        chr(byte) if chr(byte) in "abcdefghijklmnopqrstuvwxyz0123456789-" else f"_{byte:02x}"
        for byte in value.encode()
    )
    if len(escaped) <= _MOST:
        return escaped
    return f"{escaped[:41].rstrip('_')}__{hashlib.sha256(value.encode()).hexdigest()[:20]}"


def value(text: str) -> str:
    """Return the value of a label. One that ends with a hash is returned as it is."""
    if "__" in text:
        return text
    whole = _ESCAPE.sub(lambda found: chr(int(found[1], 16)), text)
    try:
        return whole.encode("latin-1").decode()
    except UnicodeError:
        return text


def labels(tags: Mapping[str, str]) -> dict[str, str]:
    """Return tags as labels. The names of ours are valid as both."""
    return {key: label(each) for key, each in tags.items()}


def filter_of(labels: Mapping[str, str]) -> str:
    """Return a filter for resources with these labels."""
    return " AND ".join(f'(labels.{key} = "{label(each)}")' for key, each in labels.items())


def named(names: Iterable[str]) -> str:
    """Return a filter for resources with one of these names."""
    return " OR ".join(f'(name = "{name}")' for name in names)


def image_path(image: str, project: str) -> str:
    """Return the path of an image, or of a family, which means its newest image."""
    if image.startswith("projects/"):
        return image
    return f"projects/{project}/global/images/{image.removeprefix('global/images/')}"


def disk_of(link: str) -> str:
    """Return the id of the volume whose disk a link leads to; "": it leads to no zone's disk."""
    found = _DISK.search(link)
    return id_of(found[1], found[2]) if found else ""


def last(link: str) -> str:
    """Return the name in a link to a resource."""
    return link.rpartition("/")[2]
