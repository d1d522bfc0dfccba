"""The `[images]` table of the configuration."""

from __future__ import annotations

from importlib import resources

import attrs

from infranetes.images import reference
from infranetes.images.manifest import host_platform
from infranetes_common.errors import ConfigError, InvalidArgument


def default_policy() -> str:
    """The path of the signature policy that is used unless another is named: images are taken as they are."""
    return str(resources.files(__package__).joinpath("policy.json"))


@attrs.frozen
class ImagesConfig:
    """How images are fetched and kept."""

    # Registries (HOST or HOST:PORT) that may be asked over plain http or with a certificate nobody signed.
    insecure_registries: tuple[str, ...] = ()
    # A containers-policy.json(5); empty: ours, which takes every image.
    policy: str = ""
    # A containers-registries.conf(5): mirrors and where names lead; empty: where skopeo looks by itself.
    registries_conf: str = ""
    # A containers-auth.json(5) for pulls that bring no credentials; empty: where skopeo looks by itself.
    auth_file: str = ""
    # What is chosen from images for several platforms; empty: the node's own.
    platform: str = ""
    # Images that kubelet shall never remove for space.
    pinned: tuple[str, ...] = ()
    # Images that every VM has from the start, where the provider can; pinned too.
    preload: tuple[str, ...] = ()
    max_parallel_pulls: int = 4
    # A pull that moves no byte for so many seconds is given up.
    stall_seconds: float = 60.0
    # How often a pull is tried when the fault may pass.
    attempts: int = 3
    # Bytes that one layer may unpack to.
    max_layer_bytes: int = 64 << 30
    skopeo: str = "skopeo"

    def __attrs_post_init__(self) -> None:
        for host in self.insecure_registries:
            if not reference.is_registry(host):
                raise ConfigError(f"images.insecure_registries: {host!r} is not HOST or HOST:PORT")
        for key in ("pinned", "preload"):
            for name in getattr(self, key):
                try:
                    reference.parse(name)
                except InvalidArgument as e:
                    raise ConfigError(f"images.{key}: {e}") from None
        if self.platform and len(self.platform.split("/")) != 2:
            raise ConfigError(
                f"images.platform: {self.platform!r} is not OS/ARCHITECTURE, such as linux/amd64"
            )
        for name in ("max_parallel_pulls", "stall_seconds", "attempts", "max_layer_bytes"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"images.{name}: it has to be more than 0")

    @property
    def effective_platform(self) -> str:
        return self.platform or host_platform()
