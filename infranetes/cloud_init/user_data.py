# SPDX-License-Identifier: Apache-2.0
"""A pod's own documents for cloud-init: found where its annotations say, checked, and told apart."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping

import attrs
import yaml

from infranetes.cloud_init.document import GuestDocument
from infranetes.providers.annotation_rows import PREFIX
from infranetes.providers.machine_annotations import MountedFile, Source, key_lines
from infranetes_common.errors import InvalidArgument

MAX_BYTES = 1 << 20
_MAX_EVENTS = 10_000  # of YAML that are looked at; what comes after them, cloud-init judges
_MAX_META_EVENTS = 2_000
_MAX_DEPTH = 20
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

CLOUD_CONFIG = "text/cloud-config"
SHELL_SCRIPT = "text/x-shellscript"
GZIP = "application/gzip"
MULTIPART = "multipart/mixed"
UNKNOWN = "text/plain"  # cloud-init finds out by itself
# By the beginning of the first line, as cloud-init and cloudbase-init do.
_KINDS = (
    ("#cloud-config-archive", "text/cloud-config-archive"),
    ("#cloud-config-jsonp", "text/cloud-config-jsonp"),
    ("#cloud-config", CLOUD_CONFIG),
    ("#cloud-boothook", "text/cloud-boothook"),
    ("#include-once", "text/x-include-once-url"),
    ("#include", "text/x-include-url"),
    ("#part-handler", "text/part-handler"),
    ("#upstart-job", "text/upstart-job"),
    ("## template: jinja", "text/jinja2"),
    ("#!", SHELL_SCRIPT),
    ("#ps1", SHELL_SCRIPT),
    ("rem cmd", SHELL_SCRIPT),
    ("<powershell>", SHELL_SCRIPT),
    ("<script>", SHELL_SCRIPT),
    ("mime-version:", MULTIPART),
    ("content-type: multipart", MULTIPART),
)


@attrs.frozen
class UserDocument:
    """A document of the pod's, byte by byte as the pod has it."""

    what: str  # where it is from, for people
    content: bytes = attrs.field(repr=False)

    @property
    def kind(self) -> str:
        """Its MIME type."""
        if self.content.startswith(b"\x1f\x8b"):
            return GZIP
        return next((kind for start, kind in _KINDS if self.start.startswith(start)), UNKNOWN)

    @property
    def start(self) -> str:
        """How it begins, in lower case, by which it is told apart."""
        return self.content[:4096].decode("utf-8", "replace").lstrip("\ufeff \t\r\n").lower()


def documents(document: GuestDocument) -> tuple[UserDocument, ...]:
    """Return the pod's user-data: what its annotation has, then what its source has.

    :raise InvalidArgument: one is not there, too large, or not what it says that it is."""
    choices = document.choices
    found = []
    if choices.user_data:
        found.append(UserDocument(f"annotation {PREFIX}user-data", choices.user_data.encode()))
    if choices.user_data_source is not None:
        what = f"annotation {PREFIX}user-data-source ({_named(choices.user_data_source)})"
        content = _content(document, what, choices.user_data_source)
        found.append(UserDocument(what, _decoded(what, content) if choices.user_data_base64 else content))
    for each in found:
        _check(each, alone=choices.user_data_alone)
    return tuple(found)


def ssh_keys(document: GuestDocument) -> tuple[str, ...]:
    """Return the keys of people: what the annotation has, then what its source has, each once.

    :raise InvalidArgument: the source is not there, or a line in it is no key."""
    choices = document.choices
    found = list(choices.ssh_keys)
    if choices.ssh_keys_source is not None:
        what = f"annotation {PREFIX}ssh-keys-source ({_named(choices.ssh_keys_source)})"
        content = _content(document, what, choices.ssh_keys_source, default="authorized_keys")
        found += key_lines(what, content.decode("utf-8", "replace"))
    return tuple(dict.fromkeys(found))


def meta_data(text: str) -> dict[str, object]:
    """Return the entries of meta-data that a pod has. :raise InvalidArgument: it is no mapping of YAML."""
    what = f"annotation {PREFIX}meta-data"
    if not text:
        return {}
    depth = 0
    for number, event in enumerate(_events(what, text)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent) or depth > _MAX_DEPTH or number > _MAX_META_EVENTS:
            raise InvalidArgument(f"{what}: expected a small mapping of names to values, without aliases")
    try:
        loaded = yaml.load(text, Loader=_LOADER)  # noqa: S506 - a safe loader
    except (yaml.YAMLError, ValueError, TypeError):
        raise InvalidArgument(f"{what}: expected a mapping of names to values") from None
    if not isinstance(loaded, dict):
        raise InvalidArgument(f"{what}: expected a mapping of names to values, such as `instance-id: web-1`")
    return {str(name): value for name, value in loaded.items()}


def _named(source: Source) -> str:
    if isinstance(source, MountedFile):
        return source.path
    return "/".join(part for part in (source.kind, source.name, source.key) if part)


def _content(document: GuestDocument, what: str, source: Source, default: str = "") -> bytes:
    if isinstance(source, MountedFile):
        file = document.files.get(source.path)
        if file is None:
            raise InvalidArgument(
                f"{what}: no ConfigMap or Secret that the pod mounts has this file; expected the mountPath "
                "of one, a slash, and one of its keys"
            )
        return file.content
    keys = document.objects.get((source.kind, source.name))
    if keys is None:
        raise InvalidArgument(f"{what}: the node does not have it; mount it, and give the path of the file")
    key = source.key or default
    if key and key not in keys:
        raise InvalidArgument(f"{what}: it has no key {key}")
    return keys[key] if key else _of_keys(keys)


def _of_keys(keys: Mapping[str, bytes]) -> bytes:
    """Return the document of an object whose keys are those of a #cloud-config, as Virtlet has them."""
    lines = [b"#cloud-config"]
    for name, value in sorted(keys.items()):
        lines += [name.encode() + b":", *(b"  " + line for line in value.splitlines())]
    return b"\n".join(lines) + b"\n"


def _decoded(what: str, content: bytes) -> bytes:
    try:
        return base64.b64decode(b"".join(content.split()), validate=True)
    except binascii.Error:
        raise InvalidArgument(
            f"{what}: expected base64, as annotation {PREFIX}user-data-encoding says; leave that out if the "
            "text is there as it is"
        ) from None


def _check(document: UserDocument, *, alone: bool) -> None:
    what, content = document.what, document.content
    if len(content) > MAX_BYTES:
        raise InvalidArgument(
            f"{what} has {len(content)} bytes, over {MAX_BYTES}: have it fetch what is large from elsewhere"
        )
    if document.kind == GZIP:
        return
    if b"\0" in content:
        raise InvalidArgument(f"{what}: it has a NUL byte: expected text, or text that gzip has compressed")
    if document.kind == CLOUD_CONFIG:
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InvalidArgument(
                f"{what}: byte {error.start} is not UTF-8, which a #cloud-config has to be"
            ) from None
        first = True
        for event in _events(what, text):
            if first and isinstance(event, yaml.NodeEvent):
                if not isinstance(event, yaml.MappingStartEvent):
                    raise InvalidArgument(
                        f"{what}: a #cloud-config is a mapping, such as `runcmd: [date]` in the line below "
                        "it; a script begins with #!"
                    )
                first = False
    elif not alone and document.kind == UNKNOWN and re.match(r"[a-z_]+:(\s|$)", document.start):
        raise InvalidArgument(
            f"{what}: it looks like a cloud-config, of which cloud-init takes notice only if its first line "
            "is #cloud-config"
        )


def _events(what: str, text: str) -> list[yaml.Event]:
    """Return the events of YAML, up to a bound. :raise InvalidArgument: it is none."""
    found = []
    try:
        for event in yaml.parse(text, Loader=_LOADER):
            found.append(event)
            if len(found) > _MAX_EVENTS:
                break
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}, column {mark.column + 1}:" if mark is not None else ""
        problem = getattr(error, "problem", None) or "it has characters that YAML can't have"
        raise InvalidArgument(f"{what} is no YAML:{where} {problem}") from None
    return found
