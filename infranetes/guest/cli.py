# SPDX-License-Identifier: Apache-2.0
"""The command `infranetes-guest`: build the guest image, and show the one in use."""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from infranetes.guest import image as images
from infranetes.guest import recipe
from infranetes.guest.build import build, say
from infranetes.guest.image import GuestImage
from infranetes_common import __version__
from infranetes_common.errors import InfranetesError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="infranetes-guest", description="The image that a pod's virtual machine boots."
    )
    parser.add_argument("--version", action="version", version=f"infranetes-guest {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    builder = commands.add_parser("build", help="build the image, unless it is there already")
    builder.add_argument(
        "--debs", type=Path, default=Path("dist"), help="where the .deb files of vmserver are (%(default)s)"
    )
    builder.add_argument("--force", action="store_true", help="build anew, with Debian's latest updates")
    builder.add_argument(
        "--containers",
        choices=sorted(recipe.CONTAINERS),
        default=recipe.DEFAULT_CONTAINERS,
        help="what runs containers in it (%(default)s): docker; oci, which is conmon and crun; both: oci, "
        "and Docker for pods that choose it",
    )
    shower = commands.add_parser("show", help="show the image in use")
    for each in (builder, shower):
        each.add_argument(
            "--image-dir", type=Path, default=images.DEFAULT_DIR, help="where images are (%(default)s)"
        )
    options = parser.parse_args(arguments)
    try:
        if options.command == "build":
            started = time.monotonic()
            _show(
                build(
                    options.image_dir,
                    options.debs,
                    functools.partial(say, started),
                    force=options.force,
                    containers=recipe.CONTAINERS[options.containers],
                )
            )
        else:
            _show(images.current(options.image_dir))
    except InfranetesError as error:
        print(f"infranetes-guest: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"infranetes-guest: {error.filename or 'input/output'}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("infranetes-guest: interrupted; nothing is left of the build", file=sys.stderr)
        return 130
    return 0


def _show(image: GuestImage) -> None:
    built = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(image.built_at))
    print(f"guest image {image.directory}")
    print(f"  built   {built}")
    print(f"  Debian  {image.codename}, Linux {image.kernel_version}")
    print(f"  agent   {', '.join(image.packages)}")
    if image.providers:
        print(f"  runs    containers by {', '.join(image.providers)}")


if __name__ == "__main__":
    sys.exit(main())
