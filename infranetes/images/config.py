# SPDX-License-Identifier: Apache-2.0
"""The `[images]` table of the configuration."""

from __future__ import annotations

from importlib import resources

import attrs
from attrs import Attribute
from attrs.validators import gt

from infranetes.images import reference
from infranetes.images.manifest import host_platform
from infranetes_common import config_outside as outside
from infranetes_common.errors import InvalidArgument


def default_policy() -> str:
    """Return the path of the signature policy used by default, which accepts every image."""
    return str(resources.files(__package__).joinpath("policy.json"))


def _are_registries(instance: object, attribute: Attribute[tuple[str, ...]], hosts: tuple[str, ...]) -> None:
    for host in hosts:
        if not reference.is_registry(host):
            raise ValueError(f"{host!r} is not HOST or HOST:PORT")


def _are_images(instance: object, attribute: Attribute[tuple[str, ...]], names: tuple[str, ...]) -> None:
    for name in names:
        try:
            reference.parse(name)
        except InvalidArgument as error:
            raise ValueError(str(error)) from None


def _is_platform(instance: object, attribute: Attribute[str], platform: str) -> None:
    if platform and len(platform.split("/")) != 2:
        raise ValueError(f"{platform!r} is not OS/ARCHITECTURE, such as linux/amd64")


@attrs.frozen
class ImagesConfig:
    """How images are fetched and kept."""

    # Registries (HOST or HOST:PORT) that may be asked over plain http or with an untrusted certificate.
    insecure_registries: tuple[str, ...] = attrs.field(
        default=(), validator=_are_registries, metadata=outside.names(outside.never("no registry was asked"))
    )
    # A containers-policy.json(5); empty: the default, which accepts every image.
    policy: str = attrs.field(default="", metadata=outside.names(outside.json_file))
    # A containers-registries.conf(5) with mirrors and aliases; empty: skopeo's default.
    registries_conf: str = attrs.field(default="", metadata=outside.names(outside.toml_file))
    # A containers-auth.json(5) for pulls without credentials; empty: skopeo's default.
    auth_file: str = attrs.field(default="", metadata=outside.names(outside.json_file))
    # The platform chosen from images for several; empty: the node's own.
    platform: str = attrs.field(default="", validator=_is_platform)
    # Images that kubelet must never remove to make room.
    pinned: tuple[str, ...] = attrs.field(default=(), validator=_are_images)
    # Images that every VM has from the start, if the provider supports that; they are pinned, too.
    preload: tuple[str, ...] = attrs.field(
        default=(),
        validator=_are_images,
        metadata=outside.names(outside.never("no registry was asked")),
    )
    max_parallel_pulls: int = attrs.field(default=4, validator=gt(0))
    # A pull that moves no byte for so many seconds is given up.
    stall_seconds: float = attrs.field(default=60.0, validator=gt(0))
    # How many times a pull is tried if its fault may pass.
    attempts: int = attrs.field(default=3, validator=gt(0))
    # The most bytes that one layer may unpack to.
    max_layer_bytes: int = attrs.field(default=64 << 30, validator=gt(0))
    # The most bytes that the disk of a machine's image may have for its VM, and that its file may reach to.
    max_disk_bytes: int = attrs.field(default=2 << 40, validator=gt(0))
    skopeo: str = attrs.field(default="skopeo", metadata=outside.names(outside.program))

    @property
    def effective_platform(self) -> str:
        return self.platform or host_platform()
