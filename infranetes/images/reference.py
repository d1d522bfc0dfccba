# SPDX-License-Identifier: Apache-2.0
"""References to container images, such as docker.io/library/busybox:1.36 (distribution/reference)."""

from __future__ import annotations

import re

import attrs

from infranetes_common.errors import InvalidArgument

DEFAULT_REGISTRY = "docker.io"
MAX_LENGTH = 255 + 1 + 128 + 1 + 71  # repository, tag, digest

_COMPONENT = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_REGISTRY = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-fA-F:]+\])(?::[0-9]{{1,5}})?")
_PATH = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_HEX64 = re.compile(r"[0-9a-f]{64}")


@attrs.frozen
class Reference:
    """A full reference: registry, path, and either a tag or a digest."""

    registry: str  # docker.io, localhost:5000
    path: str  # library/busybox
    tag: str = ""
    digest: str = ""  # sha256:...

    @property
    def repository(self) -> str:
        return f"{self.registry}/{self.path}"

    def __str__(self) -> str:
        return f"{self.repository}@{self.digest}" if self.digest else f"{self.repository}:{self.tag}"

    def at(self, digest: str) -> Reference:
        """Return the reference to another image of this repository, by digest."""
        return Reference(self.registry, self.path, digest=digest)


def is_digest(text: object) -> bool:
    """Return whether a value is `sha256:` and 64 lower-case hex digits."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def is_registry(text: str) -> bool:
    """Return whether a string can be the registry in a reference: HOST or HOST:PORT."""
    return _REGISTRY.fullmatch(text) is not None


def parse(text: str) -> Reference:
    """Parse a reference and complete it: `busybox` is docker.io/library/busybox:latest.

    If it has both a tag and a digest, the tag is dropped.

    :raise InvalidArgument: it is not a reference; the message says what is wrong with it.
    """

    def refuse(why: str) -> InvalidArgument:
        shown = text if len(text) <= 100 else text[:100] + "..."
        return InvalidArgument(f"image reference {shown!r}: {why}")

    if not text:
        raise refuse("it is empty; give a name such as docker.io/library/busybox:1.36")
    if len(text) > MAX_LENGTH:
        raise refuse(f"it is longer than {MAX_LENGTH} characters")
    name, at, digest = text.partition("@")
    if at and not is_digest(digest):
        raise refuse("what follows @ has to be sha256: and 64 hex digits in lower case")
    slash = name.rfind("/")
    colon = name.find(":", slash + 1)
    tag = "" if colon < 0 else name[colon + 1 :]
    if colon >= 0:
        name = name[:colon]
        if not _TAG.fullmatch(tag):
            raise refuse(f"{tag!r} is no tag: 1 to 128 letters, digits, _ . and -, not beginning with . or -")
    if _HEX64.fullmatch(name):
        raise refuse("64 hex digits are an image's id, not a name; write sha256: before an id")
    registry, path = _split(name)
    if not _REGISTRY.fullmatch(registry):
        raise refuse(f"{registry!r} is no registry host")
    if not _PATH.fullmatch(path):
        if path != path.lower():
            raise refuse("the repository has to be in lower case")
        raise refuse("the repository has to be names of a-z, 0-9 and single separators . _ - between slashes")
    if len(registry) + 1 + len(path) > 255:
        raise refuse("registry and repository are longer than 255 characters together")
    if digest:
        return Reference(registry, path, digest=digest)
    return Reference(registry, path, tag=tag or "latest")


def _split(name: str) -> tuple[str, str]:
    first, slash, rest = name.partition("/")
    named = slash and ("." in first or ":" in first or first == "localhost")
    registry, path = (first, rest) if named else (DEFAULT_REGISTRY, name)
    if registry == "index.docker.io":
        registry = DEFAULT_REGISTRY
    if registry == DEFAULT_REGISTRY and "/" not in path:
        path = f"library/{path}"
    return registry, path
