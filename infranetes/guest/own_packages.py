# SPDX-License-Identifier: Apache-2.0
"""The agent's packages for the guest image, from the archive that this node's own came from."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from infranetes.guest import recipe
from infranetes.guest.programs import Progress, run
from infranetes_common.commands import Command, thd_run
from infranetes_common.errors import FailedPrecondition, InfranetesError

_SECONDS = 60.0  # for dpkg-query
_INSTALLED = "infranetes"  # the package whose version the agent's has to have


@contextlib.contextmanager
def downloaded(progress: Progress) -> Iterator[Path]:
    """Have apt download the packages, of the installed version, into a directory that is removed afterwards.

    :raise FailedPrecondition: Infranetes was not installed by its packages.
    :raise InfranetesError: apt knows none of that version, or can't reach its archive.
    """
    version = _installed_version()
    wanted = [f"{name}={version}" for name in recipe.OUR_PACKAGES]
    with tempfile.TemporaryDirectory(prefix="infranetes-debs-", dir="/var/tmp") as directory:
        path = Path(directory)
        path.chmod(0o755)
        progress(f"downloading {' and '.join(recipe.OUR_PACKAGES)} {version}")
        try:
            run("apt-get", "download", *wanted, directory=path)
        except InfranetesError as error:
            raise InfranetesError(
                f"the agent's packages ({', '.join(wanted)}) could not be downloaded; add the archive that "
                "has them to apt's sources, or run"
                f" `infranetes-guest build --debs DIRECTORY`: {error}"
            ) from None
        yield path


def _installed_version() -> str:
    command = ["dpkg-query", "--show", "--showformat=${db:Status-Status} ${Version}", _INSTALLED]
    try:
        shown = thd_run(Command(command, _SECONDS)).stdout.decode()
    except FailedPrecondition:
        shown = ""
    status, _, version = shown.partition(" ")
    if status != "installed" or not version:
        raise FailedPrecondition(
            f"the package {_INSTALLED} is not installed, so it is not known which agent belongs in the "
            "image; run"
            " `infranetes-guest build --debs DIRECTORY`, where DIRECTORY has its .deb files"
        )
    return version
