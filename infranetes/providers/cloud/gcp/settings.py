# SPDX-License-Identifier: Apache-2.0
"""Configuration keys of GCP."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import attrs

from infranetes.providers.cloud.gcp.names import (
    IMAGE,
    KEY,
    LABEL,
    NETWORK,
    PROJECT,
    SUBNETWORK,
    ZONE,
    region_of,
)
from infranetes.providers.cloud.settings import ENDPOINT, CloudSettings, all_of, matching, not_empty
from infranetes_common import config_outside as outside

_ACCOUNT = r"[a-z0-9][a-z0-9.-]*@[a-z0-9.-]+"


def _are_zones(instance: object, attribute: attrs.Attribute[tuple[str, ...]], value: tuple[str, ...]) -> None:
    if not value or not all(re.fullmatch(ZONE, zone) for zone in value):
        raise ValueError("zones are expected, such as europe-west1-b")
    if len({region_of(zone) for zone in value}) > 1:
        raise ValueError("zones of one region are expected: subnetworks are regional")


def _needs_vtpm(instance: Settings, attribute: attrs.Attribute[bool], value: bool) -> None:
    if value and not instance.vtpm:
        raise ValueError("it measures what boots with the virtual TPM: it needs vtpm, or has to be false")


def _key(path: str) -> Iterator[outside.Finding]:
    from infranetes.providers.cloud.gcp.credential_files import _thd_read  # late: with it come its libraries

    return outside.tried(lambda: _thd_read(Path(path), "key_file"), "key_file")


@attrs.frozen(kw_only=True)
class Settings(CloudSettings):
    """The table `providers.gcp`."""

    TENANT_KEYS: ClassVar[tuple[str, ...]] = (
        "project",
        "key_file",
        "impersonated_account",
        "image",
        "image_projects",
        "network",
        "subnetwork",
        "tags",
        "service_account",
        "public_address",
        "disk_key",
    )

    project: str = attrs.field(validator=[not_empty, matching(PROJECT, "a project's id")])
    zones: tuple[str, ...] = attrs.field(validator=_are_zones)  # zones of one region, tried in this order
    image: str = attrs.field(
        validator=[
            not_empty,
            matching(IMAGE, "an image's name, family/NAME, or projects/PROJECT/global/images/[family/]NAME"),
        ]
    )  # the image of a guest with our agent
    network: str = attrs.field(default="", validator=matching(NETWORK, "a network's name"))
    subnetwork: str = attrs.field(default="", validator=matching(SUBNETWORK, "a subnetwork's name"))
    tags: tuple[str, ...] = attrs.field(default=(), validator=all_of(LABEL, "network tags"))
    service_account: str = attrs.field(default="", validator=matching(_ACCOUNT, "an account's address"))
    public_address: bool = False  # for pods without an annotation
    disk_gib: int = attrs.field(default=0, validator=attrs.validators.ge(0))  # 0: as the image has it
    disk_type: str = attrs.field(default="pd-balanced", validator=matching(LABEL, "a disk type's name"))
    # The key that VMs' disks are encrypted with; empty: Google's own.
    disk_key: str = attrs.field(
        default="",
        validator=matching(KEY, "a key, projects/…/locations/…/keyRings/…/cryptoKeys/NAME,"),
    )
    # Shielded VM options, for VMs that boot by UEFI. The defaults are Google's.
    secure_boot: bool = False
    vtpm: bool = True
    integrity_monitoring: bool = attrs.field(default=True, validator=_needs_vtpm)
    volume_type: str = attrs.field(default="pd-balanced", validator=matching(LABEL, "a disk type's name"))
    image_projects: tuple[str, ...] = attrs.field(default=(), validator=all_of(PROJECT, "projects' ids"))
    sizes: tuple[str, ...] = ("e2-*", "n2-*", "n2d-*", "c2-*", "g2-*", "a2-*")
    # Of any type that gcloud writes; empty: credentials are found as by Google's own tools.
    key_file: str = attrs.field(default="", metadata=outside.names(lambda path: _key(path)))
    # A service account that these credentials impersonate; empty: calls are made with the credentials' own
    # account.
    impersonated_account: str = attrs.field(default="", validator=matching(_ACCOUNT, "an account's address"))
    endpoint: str = attrs.field(default="", validator=matching(ENDPOINT, "https://HOST"))
    # In place of the endpoint of Google's price list.
    price_endpoint: str = attrs.field(default="", validator=matching(ENDPOINT, "https://HOST"))
    # A file with one's own prices, see `own_prices`.
    prices_file: str = attrs.field(default="", metadata=outside.names(outside.file))
    token_endpoint: str = attrs.field(default="", validator=matching(ENDPOINT, "https://HOST"))
