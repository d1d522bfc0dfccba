# SPDX-License-Identifier: Apache-2.0
"""Configuration keys of OpenStack."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import ClassVar, Literal

import attrs

from infranetes.providers.cloud.openstack.names import ID, NAME
from infranetes.providers.cloud.settings import CloudSettings, all_of, matching, not_empty
from infranetes_common import config_outside as outside

_is_name = matching(NAME, "a name or an id")
_are_names = all_of(NAME, "names or ids")


def _has_zone(instance: Settings, attribute: attrs.Attribute[bool], value: bool) -> None:
    if not value and not instance.volume_zone and not instance.zones:
        raise ValueError("without it volumes have a zone: give volume_zone or zones")


def _is_reached(instance: Settings, attribute: attrs.Attribute[str], value: str) -> None:
    if value == "public" and not (instance.public_address and instance.agent_address == "public"):
        raise ValueError('pods have one only with public_address = true, and agent_address = "public"')


@attrs.frozen(kw_only=True)
class Settings(CloudSettings):
    """The table `providers.openstack`."""

    TENANT_KEYS: ClassVar[tuple[str, ...]] = (
        "cloud",
        "clouds_file",
        "image",
        "network",
        "security_groups",
        "zones",
        "server_group",
        "floating_network",
        "public_address",
        "pod_address",
        "disk_type",
        "volume_type",
        "volume_zone",
        "image_projects",
    )

    # An entry of clouds.yaml.
    cloud: str = attrs.field(validator=[not_empty, matching(NAME, "a cloud's name")])
    clouds_file: str = ""  # empty: clouds.yaml where OpenStack's other clients look for it
    region: str = attrs.field(default="", validator=_is_name)  # empty: as clouds.yaml says
    image: str = attrs.field(validator=[not_empty, _is_name])  # the image of a guest with our agent
    network: str = attrs.field(validator=[not_empty, _is_name])  # from which pods get their addresses
    security_groups: tuple[str, ...] = attrs.field(default=(), validator=_are_names)
    zones: tuple[str, ...] = attrs.field(default=(), validator=all_of(NAME, "availability zones"))
    server_group: str = attrs.field(default="", validator=matching(ID, "a server group's id"))
    # The network from which public addresses are allocated.
    floating_network: str = attrs.field(default="", validator=_is_name)
    public_address: bool = False  # for pods without an annotation
    # Which of a VM's addresses is the pod's.
    pod_address: Literal["private", "public"] = attrs.field(default="private", validator=_is_reached)
    disk_gib: int = attrs.field(default=0, validator=attrs.validators.ge(0))  # 0: as the flavor has it
    # The size of the root volumes of pods whose flavor has no disk; 0: such flavors are not used.
    diskless_gib: int = attrs.field(default=0, validator=attrs.validators.ge(0))
    # The type of root volumes; empty: Cinder's default.
    disk_type: str = attrs.field(default="", validator=_is_name)
    # The type of persistent volumes, and Cinder's zone for them; empty: Cinder's defaults.
    volume_type: str = attrs.field(default="", validator=_is_name)
    volume_zone: str = attrs.field(default="", validator=_is_name)
    # Whether Nova gives a server volumes of any zone, as it does by default (cross_az_attach).
    cross_zone_volumes: bool = attrs.field(default=True, validator=_has_zone)
    # Names of Nova's PCI aliases that stand for GPUs, with * and ?.
    gpu_aliases: tuple[str, ...] = attrs.field(default=("*",), validator=all_of(r"[A-Za-z0-9_*?-]+", "names"))
    # A file with one's own prices, see `own_prices`.
    prices_file: str = attrs.field(default="", metadata=outside.names(outside.file))
    image_projects: tuple[str, ...] = attrs.field(default=(), validator=all_of(ID, "projects' ids"))

    @property
    def pods_are_public(self) -> bool:
        return self.pod_address == "public"

    def look_outside(self, is_set: Callable[[str], bool]) -> Iterator[outside.Finding]:
        """Look at the cloud's entry, and say that the cloud was not asked."""
        from infranetes.providers.cloud.openstack import clouds_file  # late: with it come its libraries

        entries = [(self.clouds_file, self.cloud, "clouds_file" if self.clouds_file else "cloud")]
        for name, its in self.tenants.items():
            if "cloud" in its or "clouds_file" in its:
                file, cloud = (str(its.get(key, getattr(self, key))) for key in ("clouds_file", "cloud"))
                entries.append(
                    (file, cloud, f"tenants.{name}.{'cloud' if 'cloud' in its else 'clouds_file'}")
                )
        for file, cloud, key in entries:
            look = partial(clouds_file._thd_read, clouds_file.find(file), cloud)
            yield from (attrs.evolve(said, key=key) for said in outside.tried(look))
        yield from super().look_outside(is_set)
