# SPDX-License-Identifier: Apache-2.0
"""`infranetes-guest image`: its arguments, and what it prints."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from infranetes.images.reference import parse
from infranetes_common.errors import InvalidArgument

if TYPE_CHECKING:
    from infranetes.guest.machine_images import Seen

Say = Callable[[str], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `infranetes-guest image`."""
    commands = parser.add_subparsers(dest="image_command", required=True, metavar="COMMAND")
    words = "make an image of a machine's disk, as KubeVirt's containerDisks are"
    builder = commands.add_parser("build", help=words, description=f"{words[0].upper()}{words[1:]}.")
    builder.add_argument("disk", type=Path, help="qcow2, raw or ISO, perhaps compressed by gzip, xz or zstd")
    builder.add_argument("--tag", required=True, metavar="REFERENCE", help="the image's name in a registry")
    builder.add_argument("--agent", action="store_true", help="say that Infranetes' agent is in it")
    builder.add_argument(
        "--artifact",
        action="store_true",
        help="the image is the disk itself, which a node need not take out of it; not for KubeVirt",
    )
    builder.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="the OCI archive to write; by default the disk's name and .oci.tar, unless it is pushed",
    )
    builder.add_argument("--push", action="store_true", help="send it to the registry, by skopeo")
    words = "show what a disk or an image of one is, and whether it can be booted"
    shower = commands.add_parser("inspect", help=words, description=f"{words[0].upper()}{words[1:]}.")
    shower.add_argument("what", metavar="FILE|REFERENCE", help="a disk, or an image in a registry")
    for each in (builder, shower):
        each.add_argument(
            "--insecure",
            action="store_true",
            help="the registry speaks plain http, or has a certificate that is not trusted",
        )
        each.add_argument(
            "--authfile", default="", metavar="FILE", help="the registry's credentials (default: skopeo's)"
        )
        each.add_argument("--json", action="store_true", help="print JSON on standard output")


def run_subcommand(options: argparse.Namespace, say: Say) -> None:
    """Do what `add_arguments` has parsed. :raise InfranetesError: it failed."""
    if options.image_command == "build":
        _build(options, say)
    else:
        _inspect(options, say)


def _build(options: argparse.Namespace, say: Say) -> None:
    # Imported late, as below: the other subcommands start faster without Twisted.
    from infranetes.guest.machine_images import ToBuild, build_image, in_reactor

    output = options.output
    if output is None and not options.push:
        output = Path(f"{options.disk.name}.oci.tar")
    build = ToBuild(
        options.disk,
        options.tag,
        options.agent,
        options.artifact,
        output,
        options.push,
        options.insecure,
        options.authfile,
    )
    built = in_reactor(functools.partial(build_image, build=build, say=say))
    name = str(parse(options.tag))
    if options.json:
        document = {"image": name, **attrs.asdict(built), "archive": str(output) if output else None}
        print(json.dumps(document, indent=2))
        return
    print(f"image {name}")
    print(f"  digest   {built.digest}")
    print(f"  size     {built.size} bytes")
    if output is not None:
        print(f"  archive  {output}")


def _inspect(options: argparse.Namespace, say: Say) -> None:
    from infranetes.guest.machine_images import in_reactor, inspect_file, inspect_reference

    path = Path(options.what)
    if path.is_file():
        seen = in_reactor(functools.partial(inspect_file, disk=path))
    elif options.what.startswith((".", "/")):
        raise InvalidArgument(f"{options.what}: no such file")
    else:
        work = functools.partial(
            inspect_reference,
            name=options.what,
            insecure=options.insecure,
            auth_file=options.authfile,
            say=say,
        )
        seen = in_reactor(work)
    if options.json:
        print(json.dumps(attrs.asdict(seen), indent=2))
        return
    print(f"disk {options.what}")
    print(f"  format   {seen.format}")
    print(f"  size     {seen.virtual_size} bytes for its machine")
    print(f"  boots    {_boots(seen)}")
    if seen.digest:
        print(f"  digest   {seen.digest}")
        print(f"  agent    {'it says that our agent is in it' if seen.agent else 'none is told'}")


def _boots(seen: Seen) -> str:
    its = f"UEFI ({', '.join(seen.architectures)})" if seen.architectures else "UEFI"
    ways = [words for words, is_so in (("BIOS", seen.bios), (its, seen.uefi)) if is_so]
    return f"by {' and '.join(ways)}" if ways else "that is not told by its partition table"
