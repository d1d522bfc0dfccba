# SPDX-License-Identifier: Apache-2.0
"""Configuration keys of OpenStack."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TypeAlias, TypeVar

import attrs

from infranetes.providers.cloud.openstack.names import ID, NAME
from infranetes.providers.cloud.settings import CloudSettings
from infranetes_common import config_outside as outside

T = TypeVar("T")
_Validator: TypeAlias = Callable[[object, "attrs.Attribute[T]", T], None]


def _matching(pattern: str, expected: str) -> _Validator[str]:
    def check(instance: object, attribute: attrs.Attribute[str], value: str) -> None:
        if value and not re.fullmatch(pattern, value):
            raise ValueError(f"{expected} is expected")

    return check


def _given(instance: object, attribute: attrs.Attribute[str], value: str) -> None:
    if not value:
        raise ValueError("it has to be given")


def _all(pattern: str, expected: str) -> _Validator[tuple[str, ...]]:
    def check(instance: object, attribute: attrs.Attribute[tuple[str, ...]], value: tuple[str, ...]) -> None:
        if not all(re.fullmatch(pattern, each) for each in value):
            raise ValueError(f"{expected} are expected")

    return check


_is_name = _matching(NAME, "a name or an id")
_are_names = _all(NAME, "names or ids")


@attrs.frozen(kw_only=True)
class Settings(CloudSettings):
    """The table `providers.openstack`."""

    cloud: str = attrs.field(validator=[_given, _matching(NAME, "a cloud's name")])  # an entry of clouds.yaml
    clouds_file: str = ""  # empty: clouds.yaml where OpenStack's other clients look for it
    region: str = attrs.field(default="", validator=_is_name)  # empty: as clouds.yaml says
    image: str = attrs.field(validator=[_given, _is_name])  # the image of a guest with our agent
    network: str = attrs.field(validator=[_given, _is_name])  # from which pods get their addresses
    security_groups: tuple[str, ...] = attrs.field(default=(), validator=_are_names)
    zones: tuple[str, ...] = attrs.field(default=(), validator=_all(NAME, "availability zones"))
    server_group: str = attrs.field(default="", validator=_matching(ID, "a server group's id"))
    # The network from which public addresses are allocated.
    floating_network: str = attrs.field(default="", validator=_is_name)
    public_address: bool = False  # for pods without an annotation
    disk_gib: int = attrs.field(default=0, validator=attrs.validators.ge(0))  # 0: as the flavor has it
    # The type of volumes; empty: Cinder's default.
    disk_type: str = attrs.field(default="", validator=_is_name)
    # Names of Nova's PCI aliases that stand for GPUs, with * and ?.
    gpu_aliases: tuple[str, ...] = attrs.field(default=("*",), validator=_all(r"[A-Za-z0-9_*?-]+", "names"))
    # A file with one's own prices, see `own_prices`.
    prices_file: str = attrs.field(default="", metadata=outside.names(outside.file))
    image_projects: tuple[str, ...] = attrs.field(default=(), validator=_all(ID, "projects' ids"))

    def look_outside(self, is_set: Callable[[str], bool]) -> Iterator[outside.Finding]:
        """Look at the cloud's entry, and say that the cloud was not asked."""
        from infranetes.providers.cloud.openstack import clouds_file  # late: with it come its libraries

        key = "clouds_file" if self.clouds_file else "cloud"
        for said in outside.tried(
            lambda: clouds_file._thd_read(clouds_file.find(self.clouds_file), self.cloud)
        ):
            yield attrs.evolve(said, key=key)
        yield from super().look_outside(is_set)
