"""A guest image on disk: one directory, whole or not there at all."""

from __future__ import annotations

import json
from pathlib import Path

import attrs

from infranetes_common.errors import FailedPrecondition

DEFAULT_DIR = Path("/var/lib/infranetes/guest")
CURRENT = "current"  # a symbolic link in the directory of images, to the one in use
MANIFEST = "manifest.json"
BUILD_HINT = "make one with `make image` or `infranetes-guest build`"


@attrs.frozen
class GuestImage:
    """What `<directory>/manifest.json` says."""

    directory: Path
    key: str  # of what it was made of: recipe, packages of ours
    built_at: float  # seconds since 1970 UTC
    codename: str  # Debian's release
    kernel_version: str
    packages: tuple[str, ...]  # our own, as name_version

    @property
    def disk(self) -> Path:
        """A raw ext4 file system without partitions."""
        return self.directory / "disk.raw"

    @property
    def kernel(self) -> Path:
        """For direct boot."""
        return self.directory / "vmlinuz"

    @property
    def initrd(self) -> Path:
        """For direct boot."""
        return self.directory / "initrd"


def write(image: GuestImage) -> None:
    """Put the manifest into the image's directory."""
    fields = attrs.asdict(image)
    del fields["directory"]
    (image.directory / MANIFEST).write_text(json.dumps(fields, indent=2) + "\n")


def read(directory: Path) -> GuestImage:
    """The image in `directory`.

    :raise FailedPrecondition: there is none, or it is not whole; says how to make one.
    """
    try:
        fields = json.loads((directory / MANIFEST).read_bytes())
        image = GuestImage(directory, **{**fields, "packages": tuple(fields["packages"])})
    except FileNotFoundError:
        raise FailedPrecondition(f"there is no guest image in {directory}; {BUILD_HINT}") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise FailedPrecondition(f"{directory / MANIFEST} can't be read ({error}); {BUILD_HINT}") from None
    for part in (image.disk, image.kernel, image.initrd):
        if not part.is_file():
            raise FailedPrecondition(f"the guest image in {directory} lacks {part.name}; {BUILD_HINT}")
    return image


def current(images: Path) -> GuestImage:
    """The image in use among those in the directory `images`.

    :raise FailedPrecondition: there is none; says how to make one.
    """
    link = images / CURRENT
    if not link.exists():
        raise FailedPrecondition(f"there is no guest image in {images}; {BUILD_HINT}")
    return read(link.resolve())
