# SPDX-License-Identifier: Apache-2.0
"""The executable `infranetes-guest`: `first-image`, `publish`, `images` and those of `guest.cli`."""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

import attrs

from infranetes import config
from infranetes.guest import cli
from infranetes.guest import image as images
from infranetes.guest.build import say
from infranetes.guest.cli import Subcommand, Subparsers
from infranetes.guest.cloud_disk import DEFAULT_GIB, build_cloud_disk
from infranetes.guest.cloud_recipe import DEFAULT_KIND, KINDS
from infranetes.providers import libraries
from infranetes.publish.first_image import build_first_image
from infranetes.publish.interface import (
    CloudImage,
    ImagePublisher,
    Publication,
    Published,
    Report,
    label_of,
)
from infranetes.publish.plan import scan
from infranetes.publish.progress import readable
from infranetes_common.errors import ConfigError, FailedPrecondition, NotFound

DEFAULT_CONFIG = Path("/etc/infranetes/infranetes.toml")
_DISKS = "clouds"  # below the directory of guest images: disks that are being published
_DAY = 86400.0
_BOOT_MODE = "legacy-bios"


class Connect(Protocol):
    """Makes a cloud's publisher, by that cloud's table of the configuration."""

    def __call__(
        self, table: Mapping[str, object], source: str, options: argparse.Namespace
    ) -> ImagePublisher: ...


# The module of each cloud's `Connect`, which is imported when it is needed.
CLOUDS: Mapping[str, str] = {
    "aws": "infranetes.publish.aws_command",
    "gcp": "infranetes.publish.gcp_command",
    "vsphere": "infranetes.publish.vsphere_command",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return cli.main(arguments, add_subcommands)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    return cli.parser(add_subcommands)[0]


def add_subcommands(commands: Subparsers) -> Mapping[str, Subcommand]:
    """See `guest.cli.Add`."""
    first = commands.add_parser(
        "first-image",
        help="build the image, if there is none and VMs of QEMU need one",
        description="What infranetes-guest.service runs: build the image of packages that apt downloads, "
        "unless there is one or the configuration has no VMs of QEMU.",
    )
    first.add_argument(
        "--config",
        type=Path,
        default=DEFAULT_CONFIG,
        metavar="FILE",
        help="which VMs there are (%(default)s)",
    )
    publish = commands.add_parser(
        "publish",
        help="make an image of a cloud",
        description="Make the disk, upload it, register it as an image, and print what to configure. A run "
        "that was interrupted is gone on with by the next one.",
    )
    _add_cloud(publish)
    _add_clouds_own(publish)
    publish.add_argument(
        "--kind",
        choices=KINDS,
        default=DEFAULT_KIND,
        help="what runs the pod's containers (%(default)s); machine: the pod is the VM",
    )
    publish.add_argument(
        "--boot-mode",
        choices=("legacy-bios", "uefi", "uefi-preferred"),
        default=_BOOT_MODE,
        help="aws: how instances boot the image (%(default)s)",
    )
    publish.add_argument("--name", default="", metavar="NAME:VERSION", help="of an image of --kind machine")
    publish.add_argument(
        "--disk", type=Path, metavar="FILE", help="a raw disk, in place of one that is made now"
    )
    publish.add_argument(
        "--size", type=int, default=DEFAULT_GIB, metavar="GIB", help="of the disk that is made (%(default)s)"
    )
    publish.add_argument(
        "--script",
        type=Path,
        metavar="FILE",
        help="run in the tree of the disk that is made, for packages of your own",
    )
    publish.add_argument(
        "--image-dir",
        type=Path,
        default=images.DEFAULT_DIR,
        metavar="DIRECTORY",
        help="where guest images are (%(default)s)",
    )
    lister = commands.add_parser(
        "images",
        help="list a cloud's images, and remove old ones",
        description="List the images that `publish` has made. None is removed that the configuration names "
        "or that is known to be in use.",
    )
    lister.set_defaults(boot_mode=_BOOT_MODE)  # nothing is registered
    _add_cloud(lister)
    _add_clouds_own(lister)
    which = lister.add_mutually_exclusive_group()
    which.add_argument("--remove", nargs="+", default=[], metavar="IMAGE", help="remove these")
    which.add_argument(
        "--remove-older-than-days", type=_positive, metavar="N", help="remove those that are older than that"
    )
    which.add_argument(
        "--keep", type=_positive, metavar="N", help="remove all but the newest N of each kind and name"
    )
    return {
        "first-image": Subcommand(lambda options: build_first_image(options.config)),
        "publish": Subcommand(run_publish, "the same command again goes on from there"),
        "images": Subcommand(run_images, "what was not removed is still listed"),
    }


def _add_cloud(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cloud", choices=sorted(CLOUDS), help="the cloud")
    parser.add_argument(
        "--config",
        type=Path,
        default=DEFAULT_CONFIG,
        metavar="FILE",
        help="whose table [providers.CLOUD] says which account, and with which credentials (%(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")


def _add_clouds_own(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ebs-endpoint",
        default="",
        metavar="URL",
        help="aws: of EBS' direct APIs, in place of the region's own",
    )
    parser.add_argument(
        "--bucket", default="", metavar="NAME", help="gcp: of Cloud Storage, where the disk is for a while"
    )
    parser.add_argument(
        "--storage-endpoint", default="", metavar="URL", help="gcp: of Cloud Storage, in place of Google's"
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError("a whole number from 1 on is expected")
    return int(text)


# ---- publish


def run_publish(options: argparse.Namespace) -> None:
    """Upload a disk, made first unless one is given, and print the image that it becomes at the cloud."""
    report = functools.partial(say, time.monotonic())
    label = label_of(options.kind, options.name)
    with closing(_publisher(options)) as publisher:
        made_here = options.disk is None
        disk = _make_disk(options, report) if made_here else options.disk
        plan = scan(disk)
        report(f"{disk}: {readable(plan.size)}, of which {readable(plan.data_bytes)} are data")
        published = publisher.publish(Publication(plan, label), report)
    if made_here:
        disk.unlink()
    _show_published(published, options.json)


def _make_disk(options: argparse.Namespace, report: Report) -> Path:
    """Return the disk, which is made unless an earlier run that failed has left it."""
    guest = images.current(options.image_dir)
    script = options.script.read_bytes() if options.script else b""
    made_of = "\0".join((guest.key, str(guest.built_at), str(options.size)))
    digest = hashlib.sha256(made_of.encode() + b"\0" + script).hexdigest()[:16]
    directory: Path = options.image_dir / _DISKS
    directory.mkdir(parents=True, exist_ok=True)
    disk = directory / f"{options.cloud}-{options.kind}-{digest}.raw"
    is_there = disk.exists()
    if is_there:
        os.utime(disk)  # its time tells when it was last used
        report(f"going on with {disk}, which an earlier run has made")
    _remove_old(directory, report)
    if not is_there:
        build_cloud_disk(
            options.cloud,
            options.kind,
            disk,
            options.size,
            report,
            script=options.script,
            image_dir=options.image_dir,
        )
    return disk


def _remove_old(directory: Path, report: Report) -> None:
    """Remove what runs have left that nobody has gone on with for a day: disks, and what was made of them."""
    for file in directory.iterdir():
        if file.is_file() and file.stat().st_mtime < time.time() - _DAY:
            file.unlink(missing_ok=True)
            report(f"removed {file}, of a run that was never continued")


def _show_published(published: Published, as_json: bool) -> None:
    if as_json:
        print(json.dumps(attrs.asdict(published), indent=2))
        return
    print(f"image {published.image} is ready ({published.title})")
    if published.name:
        print(f"It is {published.name} to pods of nodes with imgprovider = {json.dumps(published.cloud)}.")
    else:
        print(f"\nFor the configuration of nodes:\n\n[providers.{published.cloud}]")
        for key, value in published.settings.items():
            print(f"{key} = {json.dumps(value)}")


# ---- images


def run_images(options: argparse.Namespace) -> None:
    """Run `infranetes-guest images`."""
    report = functools.partial(say, time.monotonic())
    with closing(_publisher(options)) as publisher:
        found = publisher.images()
        chosen = choose(found, options.remove, options.remove_older_than_days, options.keep, time.time())
        for image in chosen:
            publisher.remove(image)
            report(f"removed {image.id}")
    removed = {image.id for image in chosen}
    left = [image for image in found if image.id not in removed]
    if options.json:
        shown = {"images": [attrs.asdict(each) for each in left], "removed": sorted(removed)}
        print(json.dumps(shown, indent=2))
        return
    for image in left:
        created = time.strftime("%Y-%m-%d %H:%M", time.gmtime(image.created))
        words = (image.id, created, image.kind, image.name or image.title, image.used_by)
        print("  ".join(words).rstrip())
    if not left:
        print(f"{publisher.cloud} has no images that were published by this command")


def choose(
    images: Sequence[CloudImage], ids: Sequence[str], days: int | None, keep: int | None, now: float
) -> list[CloudImage]:
    """Return the images to remove.

    :param images: the newest first. :param ids: that were asked for. :param days: how old at least.
    :param keep: how many of each kind and name stay.
    :raise NotFound: there is none with an id. :raise FailedPrecondition: it is in use."""
    by_id = {image.id: image for image in images}
    for id in ids:
        if id not in by_id:
            raise NotFound(f"there is no image {id} that was published by this command")
        if by_id[id].used_by:
            raise FailedPrecondition(f"image {id} is in use: {by_id[id].used_by}")
    if ids:
        return [by_id[id] for id in dict.fromkeys(ids)]
    chosen = []
    seen: dict[tuple[str, str], int] = {}
    for image in images:
        what = (image.kind, image.name)
        seen[what] = seen.get(what, 0) + 1
        old = days is not None and image.created < now - days * _DAY
        if not image.used_by and (old or (keep is not None and seen[what] > keep)):
            chosen.append(image)
    return chosen


# ---- Both


def _publisher(options: argparse.Namespace) -> ImagePublisher:
    """Return the publisher to the account that the configuration names.

    :raise ConfigError: it names none. :raise FailedPrecondition: a library is missing."""
    cloud, path = options.cloud, options.config
    table = config.load(str(path), {}).providers.get(cloud)
    if table is None:
        raise ConfigError(f"{path}: there is no table [providers.{cloud}], which says where to publish to")
    try:
        connect = cast(Connect, import_module(CLOUDS[cloud]).connect)
    except ModuleNotFoundError as error:
        if (lacking := libraries.missing(cloud, error)) is None:
            raise
        raise FailedPrecondition(f"publishing to {cloud}: {lacking}") from None
    return connect(table, str(path), options)


if __name__ == "__main__":
    sys.exit(main())
