# SPDX-License-Identifier: Apache-2.0
"""The Debian archives that this machine's apt uses, as arguments for mmdebstrap."""

from __future__ import annotations

import os
from pathlib import Path

import attrs

from infranetes_common.commands import Command, thd_check
from infranetes_common.errors import FailedPrecondition, InfranetesError

_SECONDS = 60.0  # for apt to tell its settings
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_DEFAULT = (
    ("http://deb.debian.org/debian", "{codename}"),
    ("http://deb.debian.org/debian", "{codename}-updates"),
    ("http://deb.debian.org/debian-security", "{codename}-security"),
)
_SUFFIXES = ("", "-updates", "-security")
# apt's settings for reaching an archive: proxies, certificates, snapshots in time.
_SETTINGS = (
    "Acquire::http::",
    "Acquire::https::",
    "Acquire::Check-Valid-Until ",
    "Acquire::Check-Date ",
    "Acquire::Retries ",
)


@attrs.frozen
class Sources:
    """`lines` of a sources.list and `settings` of an apt.conf."""

    codename: str
    lines: tuple[str, ...]
    settings: tuple[str, ...]


def of_this_machine() -> Sources:
    """Return the archives of this machine's own release. See `of_release`."""
    return of_release(_codename())


def of_release(codename: str) -> Sources:
    """Return the archives of a release of Debian: where this machine's apt has that or its own release from.

    :raise FailedPrecondition: this machine has no apt.
    """
    own = _codename()
    releases = {name + suffix: codename + suffix for name in (own, codename) for suffix in _SUFFIXES}
    targets = _output(
        "apt-get",
        "indextargets",
        "--format",
        "$(ORIGIN)|$(LABEL)|$(COMPONENT)|$(REPO_URI)|$(RELEASE)",
        "Created-By: Packages",
    )
    found = []
    for target in targets.splitlines():
        origin, _, component, uri, release = target.split("|")
        archive = (uri, releases.get(release, ""))
        if origin == "Debian" and component == "main" and release in releases and archive not in found:
            found.append(archive)
    if codename not in {release for _, release in found}:
        found = [(uri, release.format(codename=codename)) for uri, release in _DEFAULT]
    option = f" [signed-by={_KEYRING}]" if _KEYRING.exists() else ""
    settings = _output("apt-config", "dump", "Acquire").splitlines()
    return Sources(
        codename,
        tuple(f"deb{option} {uri} {release} main" for uri, release in found),
        tuple(line for line in settings if line.startswith(_SETTINGS) and not line.endswith(' "";')),
    )


def _codename() -> str:
    for line in Path("/etc/os-release").read_text().splitlines():
        key, _, value = line.partition("=")
        if key == "VERSION_CODENAME":
            return value.strip('"')
    raise FailedPrecondition("/etc/os-release has no VERSION_CODENAME: guest images are built on Debian")


def _output(*command: str) -> str:
    try:
        return thd_check(Command(command, _SECONDS, environment=os.environ)).decode()
    except InfranetesError as error:
        raise FailedPrecondition(f"guest images are built on Debian: {error}") from None
