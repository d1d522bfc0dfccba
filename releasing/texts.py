# SPDX-License-Identifier: Apache-2.0
"""What a release changes in the tree's texts."""

from __future__ import annotations

import re
from datetime import datetime

UNRELEASED = "## Unreleased\n"
_RELEASED = re.compile(r"^## (\d+\.\d+\.\d+) \(", re.MULTILINE)
_VERSION = re.compile(r'^__version__ = "([^"]+)"(.*)$', re.MULTILINE)
_TOP = re.compile(r"\Ainfranetes \([^)]+\) (\w+); urgency=medium\n")
_WHO = "Infranetes maintainers <maintainers@infranetes.invalid>"


class NotReleasable(Exception):
    """The tree can't become this release; the message says what to do."""


def numbers(version: str) -> tuple[int, int, int]:
    """Return a release's version as numbers.

    :raise NotReleasable: it is none."""
    found = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", version)
    if found is None:
        raise NotReleasable(f"{version!r} is no version of a release: give three numbers, such as 0.3.0")
    return int(found[1]), int(found[2]), int(found[3])


def version_of(module: str) -> str:
    """Return the version that infranetes_common/__init__.py says."""
    found = _VERSION.search(module)
    if found is None:
        raise NotReleasable("infranetes_common/__init__.py has no __version__")
    return found[1]


def with_version(module: str, version: str) -> str:
    """Return infranetes_common/__init__.py with another version."""
    return _VERSION.sub(lambda found: f'__version__ = "{version}"{found[2]}', module, count=1)


def with_project_version(project: str, version: str) -> str:
    """Return a pyproject.toml with another version."""
    return re.sub(r'^version = "[^"]+"', f'version = "{version}"', project, count=1, flags=re.MULTILINE)


def with_chart_version(chart: str, version: str) -> str:
    """Return a Chart.yaml of another version, which is a semantic one for helm, and ours for the image."""
    semantic = re.sub(r"\.dev(\d+)$", r"-dev.\1", version)
    chart = re.sub(r"^version: .*$", f"version: {semantic}", chart, count=1, flags=re.MULTILINE)
    return re.sub(r"^appVersion: .*$", f"appVersion: {version}", chart, count=1, flags=re.MULTILINE)


def with_manifests_version(manifests: str, version: str) -> str:
    """Return the manifests that are made of the chart as they are made of one of another version."""
    label = re.sub(r'(app\.kubernetes\.io/version: )"[^"]+"', rf'\g<1>"{version}"', manifests)
    return re.sub(r"(image: registry\.example/infranetes:)\S+", rf"\g<1>{version}", label)


def day(when: datetime) -> str:
    """Return a day as the changelog has it."""
    return f"{when.day} {when:%B %Y}"


def released(changelog: str, version: str, when: datetime) -> str:
    """Return the changelog in which what was unreleased is this release.

    :raise NotReleasable: nothing is unreleased, or the version is not newer than the newest release."""
    head, found, rest = changelog.partition(UNRELEASED)
    if not found or not rest.partition("\n## ")[0].strip():
        raise NotReleasable("CHANGELOG.md has nothing below 'Unreleased': there is nothing to release")
    newest = _RELEASED.search(changelog)
    if newest is not None and numbers(version) <= numbers(newest[1]):
        raise NotReleasable(f"{version} is not newer than {newest[1]}, the newest release of CHANGELOG.md")
    return f"{head}{UNRELEASED}\n## {version} ({day(when)})\n{rest}"


def packaged(changelog: str, version: str, when: datetime) -> str:
    """Return debian/changelog whose entry on top, of the development version, is this release's."""
    found = _TOP.match(changelog)
    if found is None or "~dev" not in changelog.partition("\n")[0]:
        raise NotReleasable("debian/changelog does not begin with a development version, such as 0.3.0~dev0")
    entry, end, rest = changelog.partition("\n -- ")
    entry = entry.replace(changelog.partition(")")[0], f"infranetes ({version}", 1)
    return f"{entry}{end}{_WHO}  {_stamp(when)}\n{rest.partition(chr(10))[2]}"


def news(text: str, version: str, when: datetime) -> str:
    """Return debian/infranetes.NEWS, whose entry on top becomes this release's if it has one."""
    return packaged(text, version, when) if "~dev" in text.partition("\n")[0] else text


def begun(changelog: str, version: str, when: datetime) -> str:
    """Return debian/changelog with an entry of a development version on top."""
    found = _TOP.match(changelog)
    suite = found[1] if found is not None else "bookworm"
    return (
        f"infranetes ({version.replace('.dev', '~dev')}) {suite}; urgency=medium\n\n"
        "  * What is new is in /usr/share/doc/infranetes/CHANGELOG.md.\n\n"
        f" -- {_WHO}  {_stamp(when)}\n\n{changelog}"
    )


def following(version: str) -> str:
    """Return the development version after a release."""
    major, minor, _ = numbers(version)
    return f"{major}.{minor + 1}.0.dev0"


def schema_said(page: str, before: str, after: str) -> str:
    """Return docs/operations.md whose sentence about the store's schema names the coming release."""
    return page.replace(f"in release {before}.", f"in release {after}.", 1)


def _stamp(when: datetime) -> str:
    return f"{when:%a, %d %b %Y 00:00:00 +0000}"
