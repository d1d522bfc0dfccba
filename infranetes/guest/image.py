# SPDX-License-Identifier: Apache-2.0
"""A guest image on disk: a directory that is either whole or missing."""

from __future__ import annotations

import json
from pathlib import Path

import attrs

from infranetes_common.errors import FailedPrecondition

DEFAULT_DIR = Path("/var/lib/infranetes/guest")
CURRENT = "current"  # a symbolic link in the directory of images, to the one in use
MANIFEST = "manifest.json"
BUILD_HINT = (
    "infranetes-guest.service builds one, as `infranetes-guest build` does now (with `--debs DIRECTORY` of "
    "packages that are in no archive), and `make image` in the source tree"
)


class NoGuestImage(FailedPrecondition):
    """No guest image has been built yet."""


@attrs.frozen
class GuestImage:
    """A guest image, as its `manifest.json` describes it."""

    directory: Path
    key: str  # a digest of the recipe and Infranetes' own packages
    built_at: float  # seconds since 1970 UTC
    codename: str  # Debian's release
    kernel_version: str
    packages: tuple[str, ...]  # Infranetes' own, as NAME_VERSION
    providers: tuple[str, ...] = ()  # its ContainerProviders, the agent's default first; (): not known

    @property
    def disk(self) -> Path:
        """The disk: a raw ext4 file system without partitions."""
        return self.directory / "disk.raw"

    @property
    def kernel(self) -> Path:
        """The kernel, for direct boot."""
        return self.directory / "vmlinuz"

    @property
    def initrd(self) -> Path:
        """The initial RAM disk, for direct boot."""
        return self.directory / "initrd"


def write(image: GuestImage) -> None:
    """Write the manifest into the image's directory."""
    fields = attrs.asdict(image)
    del fields["directory"]
    (image.directory / MANIFEST).write_text(json.dumps(fields, indent=2) + "\n")


def read(directory: Path) -> GuestImage:
    """Return the image in `directory`.

    :raise FailedPrecondition: it is missing or not whole; the message says how to build one.
    """
    try:
        fields = json.loads((directory / MANIFEST).read_bytes())
        known = {field.name for field in attrs.fields(GuestImage)}  # another release may have written more
        found = {key: value for key, value in fields.items() if key in known}
        lists = {key: tuple(value) for key, value in found.items() if isinstance(value, list)}
        image = GuestImage(directory, **{**found, **lists})
    except FileNotFoundError:
        raise FailedPrecondition(f"there is no guest image in {directory}; {BUILD_HINT}") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise FailedPrecondition(f"{directory / MANIFEST} can't be read ({error}); {BUILD_HINT}") from None
    for part in (image.disk, image.kernel, image.initrd):
        if not part.is_file():
            raise FailedPrecondition(f"the guest image in {directory} lacks {part.name}; {BUILD_HINT}")
    return image


def current(images: Path) -> GuestImage:
    """Return the image in use among those in the directory `images`.

    :raise NoGuestImage: there is none; the message says how to build one.
    :raise FailedPrecondition: it is not whole; the message says how to build one.
    """
    link = images / CURRENT
    if not link.exists():
        raise NoGuestImage(f"there is no guest image in {images}; {BUILD_HINT}")
    return read(link.resolve())
