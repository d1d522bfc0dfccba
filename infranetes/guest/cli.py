# SPDX-License-Identifier: Apache-2.0
"""The command `infranetes-guest`: build the guest image, show the one in use, make clouds' disks."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import attrs

from infranetes.guest import cloud_recipe, machine_image_command, recipe
from infranetes.guest import image as images
from infranetes.guest.build import build, say
from infranetes.guest.cloud_disk import DEFAULT_GIB, build_cloud_disk
from infranetes.guest.image import GuestImage
from infranetes.guest.own_packages import downloaded
from infranetes.guest.reporting import reported
from infranetes_common import __version__
from infranetes_common.errors import InfranetesError

_UNDONE = "nothing is left of the build"
_EPILOG = """\
exit status:
  0    done
  1    failed; standard error says why
  2    the command line is wrong
  130  interrupted
"""


@attrs.frozen
class Subcommand:
    """A subcommand. :ivar interrupted: what a person is told after Ctrl-C."""

    run: Callable[[argparse.Namespace], None]
    interrupted: str = _UNDONE


Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Add: TypeAlias = Callable[[Subparsers], Mapping[str, Subcommand]]
"""Adds the parsers of further subcommands, and returns these by their names."""


def parser(further: Add) -> tuple[argparse.ArgumentParser, Mapping[str, Subcommand]]:
    """Return the parser of the command line, and the subcommands by their names."""
    top = argparse.ArgumentParser(
        prog="infranetes-guest",
        description="The image that a pod's virtual machine boots.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"infranetes-guest {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    builder = _add(commands, "build", "build the image, unless it is there already")
    builder.add_argument(
        "--debs",
        type=Path,
        metavar="DIRECTORY",
        help="where the .deb files of vmserver are (default: apt downloads them, of the installed version)",
    )
    builder.add_argument("--force", action="store_true", help="build anew, with Debian's latest updates")
    builder.add_argument(
        "--containers",
        choices=sorted(recipe.CONTAINERS),
        default=recipe.DEFAULT_CONTAINERS,
        help="what runs containers in it (%(default)s): docker; oci, which is conmon and crun; both: oci, "
        "and Docker for pods that choose it",
    )
    builder.add_argument(
        "--or-more", action="store_true", help="take the image in use if that has these containers and more"
    )
    shower = _add(commands, "show", "show the image in use")
    for each in (builder, shower):
        each.add_argument("--json", action="store_true", help="print the image as JSON on standard output")
    disk_maker = _add(commands, "cloud-disk", "make a disk of the image that a cloud's machines boot")
    _add_disk_arguments(disk_maker)
    machine_image_command.add_arguments(
        _add(commands, "image", "make and inspect images of machines' disks, for registries")
    )
    for each in (builder, shower, disk_maker):
        each.add_argument(
            "--image-dir",
            type=Path,
            default=images.DEFAULT_DIR,
            metavar="DIRECTORY",
            help="where images are (%(default)s)",
        )
    return top, {**_SUBCOMMANDS, **further(commands)}


def _add(commands: Subparsers, name: str, words: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=words, description=f"{words[0].upper()}{words[1:]}.")


def main(arguments: Sequence[str] | None = None, further: Add = lambda parsers: {}) -> int:
    """Run the command and return its exit code."""
    made, subcommands = parser(further)
    options = made.parse_args(arguments)
    try:
        subcommands[options.command].run(options)
    except InfranetesError as error:
        print(f"infranetes-guest: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"infranetes-guest: {error.filename or 'input/output'}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"infranetes-guest: interrupted; {subcommands[options.command].interrupted}", file=sys.stderr)
        return 130
    return 0


def _add_disk_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", choices=sorted(cloud_recipe.SOURCES), help="the cloud, or qemu: the node")
    parser.add_argument("file", type=Path, help="the raw disk; a file of that name is replaced")
    parser.add_argument(
        "--kind",
        choices=cloud_recipe.KINDS,
        default=cloud_recipe.DEFAULT_KIND,
        help="what runs the pod's containers (%(default)s); machine: the pod is the VM",
    )
    parser.add_argument(
        "--size", type=int, default=DEFAULT_GIB, metavar="GIB", help="of the disk (%(default)s)"
    )
    parser.add_argument(
        "--script",
        type=Path,
        metavar="FILE",
        help="run in the disk's tree, for packages and units of your own",
    )


def _build(options: argparse.Namespace) -> None:
    with contextlib.ExitStack() as stack:
        say_so = functools.partial(say, time.monotonic())
        progress = stack.enter_context(reported(options.image_dir, say_so))
        debs = options.debs or stack.enter_context(downloaded(progress))
        containers = recipe.CONTAINERS[options.containers]
        made = build(
            options.image_dir,
            debs,
            progress,
            force=options.force,
            containers=containers,
            or_more=options.or_more,
        )
    show(made, options.json)


def _make_disk(options: argparse.Namespace) -> None:
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        build_cloud_disk(
            options.source,
            options.kind,
            options.file,
            options.size,
            functools.partial(say, time.monotonic()),
            script=options.script,
            image_dir=options.image_dir,
        )
    finally:
        signal.signal(signal.SIGTERM, before)


def _machine_image(options: argparse.Namespace) -> None:
    machine_image_command.run_subcommand(options, functools.partial(say, time.monotonic()))


def _interrupt(*_: object) -> None:
    """Have what was begun undone, as after Ctrl-C."""
    raise KeyboardInterrupt


def show(image: GuestImage, as_json: bool = False) -> None:
    """Print what an image is made of. In JSON, times are seconds since 1970 UTC."""
    if as_json:
        print(json.dumps({**attrs.asdict(image), "directory": str(image.directory)}, indent=2))
        return
    built = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(image.built_at))
    print(f"guest image {image.directory}")
    print(f"  built   {built}")
    print(f"  Debian  {image.codename}, Linux {image.kernel_version}")
    print(f"  agent   {', '.join(image.packages)}")
    if image.providers:
        print(f"  runs    containers by {', '.join(image.providers)}")


_SUBCOMMANDS: Mapping[str, Subcommand] = {
    "build": Subcommand(_build),
    "cloud-disk": Subcommand(_make_disk),
    "image": Subcommand(
        lambda options: machine_image_command.run_subcommand(
            options, functools.partial(say, time.monotonic())
        ),
        "nothing is left of it",
    ),
    "show": Subcommand(lambda options: show(images.current(options.image_dir), options.json)),
}

if __name__ == "__main__":
    sys.exit(main())
