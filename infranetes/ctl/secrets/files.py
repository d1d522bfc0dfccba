# SPDX-License-Identifier: Apache-2.0
"""Files with secrets: kubeconfigs, clouds.yaml, what clouds and registries log in with, keys, passwords."""

from __future__ import annotations

import base64
import binascii
import configparser
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import yaml

from infranetes.ctl.secrets.keys import Leaf, Table, is_secret, leaves
from infranetes_common.redaction import PEM_KEY

MAX_BYTES = 1 << 20  # of a file; a kubeconfig may be as large
_MOST = 4096  # characters of a value that is guessed
_RELATIVE = ("tokenFile", "client-key")  # keys of a kubeconfig whose paths are relative to it
_OF_HEADERS = re.compile(r"(?:headers|credentials)_file$")  # keys of files in which any value may be a secret
_OF_PASSWORD = re.compile(
    r"(?:password|secret|token)_file$"
)  # and of those that begin with a line that is one
_KEY = re.compile(r"""(?<![\w.-])([A-Za-z][\w.-]*)["']?[ \t]*[:=][ \t]*""")
_QUOTED = re.compile(r'"((?:[^"\\\n]|\\.)*)"|\'([^\'\n]*)\'')
_NETRC = re.compile(r"(?<![\w.-])(password|token|secret)[ \t]+(\S+)")
_ERRORS = (ValueError, yaml.YAMLError, configparser.Error, RecursionError)

# Where the tools of clouds and registries have their credentials if nothing else is said.
WELL_KNOWN = (
    *("~/.aws/credentials", "~/.config/gcloud/application_default_credentials.json"),
    *("~/.config/openstack/clouds.yaml", "/etc/openstack/clouds.yaml"),
    *("~/.docker/config.json", "~/.config/containers/auth.json", "/run/containers/0/auth.json"),
)


def secrets_of_files(table: object, unread: dict[str, str]) -> Iterator[str]:
    """Yield the secrets in all files that a configuration names, and in WELL_KNOWN ones. Blocks.

    :param unread: files that can't be looked through are added to it, with the reason."""
    named = {Path(value): keys[-1] for keys, value in leaves(table) if value.startswith("/")}
    for known in WELL_KNOWN:
        named.setdefault(Path(known).expanduser(), "")
    waiting = list(named)
    while waiting:
        path = waiting.pop()
        text = _text(path, unread)
        yield from secrets_in(text, named[path])
        others = [path.parent / each for each in paths_in(text)]
        if text and path.name.startswith("clouds"):
            others.append(path.with_name("secure.yaml"))
        for other in others:
            if other not in named:
                named[other] = ""
                waiting.append(other)


def _text(path: Path, unread: dict[str, str]) -> str:
    """Return a file's text; "": it is none."""
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        unread[str(path)] = str(error)
        return ""
    if b"\0" in content[:1024]:  # a program or a disk
        return ""
    if len(content) > MAX_BYTES:
        unread[str(path)] = f"it has over {MAX_BYTES} bytes"
        return ""
    return content.decode("utf-8-sig", errors="replace")


def secrets_in(text: str, key: str = "") -> Iterator[str]:
    """Yield the secrets in a file. :param key: of the configuration, which names it."""
    for found in PEM_KEY.finditer(text):
        yield found[0]
    for keys, value in _values(text):
        if is_secret(keys) or _OF_HEADERS.search(key):
            yield value
            if keys[-1] == "auth":  # for a registry: USER:PASSWORD in base64
                yield _password(value)
        elif "\n" in value and value != text:  # a file within the file
            yield from secrets_in(value)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) == 1 or (lines and _OF_PASSWORD.search(key)):
        yield lines[0]


def paths_in(text: str) -> list[str]:
    """Return the paths of files that a file names and that may have secrets."""
    return [value for keys, value in _values(text) if value.startswith("/") or keys[-1] in _RELATIVE]


def _password(auth: str) -> str:
    try:
        return base64.b64decode(auth, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _values(text: str) -> list[Leaf]:
    """Return the values in a file of a known format, or whatever else looks like some."""
    for parse in (_json, _toml, _yaml):
        if found := _parsed(parse, text):
            return found
    return [*_parsed(_ini, text), *_guessed(text)]


def _parsed(parse: Callable[[str], Iterable[object]], text: str) -> list[Leaf]:
    """Return the values in a text; none if it does not have this format."""
    try:
        return [leaf for document in parse(text) for leaf in leaves(document)]
    except _ERRORS:
        return []


def _json(text: str) -> list[object]:
    return [json.loads(text, object_pairs_hook=Table, parse_int=str, parse_float=str)]


def _toml(text: str) -> list[object]:
    return [tomllib.loads(text)]


def _yaml(text: str) -> Iterable[object]:
    # Nodes have values as they are written, several values of one key, and those with any tag.
    found: Iterable[object] = yaml.compose_all(text, Loader=yaml.SafeLoader)
    return found


def _ini(text: str) -> Iterator[object]:
    parser = configparser.RawConfigParser(strict=False, allow_no_value=True, default_section="")
    parser.read_string(text)
    for section in parser.sections():
        yield {section: {key: value for key, value in parser.items(section) if value is not None}}


def _guessed(text: str) -> Iterator[Leaf]:
    """Yield values in lines KEY=VALUE and KEY: VALUE: in whole, and up to the first separator."""
    for line in text.splitlines():
        for found in _KEY.finditer(line):
            rest = line[found.end() : found.end() + _MOST].strip()
            if quoted := _QUOTED.match(rest):
                yield (found[1],), quoted[quoted.lastindex or 0]
            elif rest:
                yield (found[1],), rest
                yield (found[1],), rest.rstrip(",;}])")
                yield (found[1],), re.split(r"[\s,;&}\]]", rest, maxsplit=1)[0]
        for word in _NETRC.finditer(line):
            yield (word[1],), word[2]
