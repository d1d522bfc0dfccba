# SPDX-License-Identifier: Apache-2.0
"""What Infranetes adds to a pod's user-data."""

from __future__ import annotations

import base64
import posixpath
import re
from collections.abc import Mapping

import yaml

from infranetes.cloud_init.boot_script import boot_script
from infranetes.cloud_init.document import GuestDocument
from infranetes.cloud_init.multipart import Part
from infranetes.cloud_init.user_data import CLOUD_CONFIG, SHELL_SCRIPT
from infranetes.cloud_init.windows import windows_script
from infranetes.machines.agentless.access import GuestFile
from infranetes_common.errors import InvalidArgument

MAX_FILES = 2 << 20  # bytes of all files together
ENVIRONMENT = "/etc/cloud/environment"
# The pod's own values stay, and lists get longer.
_BESIDE = "list(append)+dict(no_replace,recurse_list)+str()"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLAIN = re.compile(r"[A-Za-z0-9_./:@%+,=-]*")


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc] # chosen at run time
    """Writes scripts as they are read, line by line."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def parts(document: GuestDocument) -> list[Part]:
    """Return what is added to the pod's own documents, after them.

    :raise InvalidArgument: the files are too large, or have paths that no guest has."""
    files = _files(document)
    config: dict[str, object] = {}
    if files:
        config["write_files"] = [
            {
                "path": path,
                "permissions": f"{file.mode & 0o7777:04o}",
                "encoding": "b64",
                "content": base64.b64encode(file.content).decode(),
            }
            for path, file in sorted(files.items())
        ]
    found = []
    if document.choices.windows:
        if script := windows_script(document):
            found.append(Part(script.encode(), SHELL_SCRIPT, "infranetes.ps1"))
    else:
        if not document.hostname:
            config["preserve_hostname"] = True
        if script := boot_script(document, files):
            config["bootcmd"] = [script]
        if document.root_stays:
            # The address and the card's own are another pod's after the first boot.
            config["updates"] = {"network": {"when": ["boot-new-instance", "boot"]}}
        if document.host_key is not None:
            found.append(Part(_cloud_config(_host_key(document)), CLOUD_CONFIG, "infranetes-host-key.txt"))
    if config:
        found.insert(0, Part(_cloud_config(config), CLOUD_CONFIG, "infranetes.txt", _BESIDE))
    return found


def _host_key(document: GuestDocument) -> dict[str, object]:
    key = document.host_key
    assert key is not None
    # cloud-init then makes none itself, and removes those of the image.
    return {"ssh_keys": {"ed25519_private": key.private, "ed25519_public": key.public}}


def _cloud_config(config: Mapping[str, object]) -> bytes:
    text: str = yaml.dump(
        dict(config), Dumper=_Dumper, sort_keys=False, width=1 << 30, default_flow_style=False
    )
    return b"#cloud-config\n" + text.encode()


def _files(document: GuestDocument) -> dict[str, GuestFile]:
    """Return what is written into the guest: the pod's files and its environment."""
    beside = document.choices.sysprep
    found = {
        path: file for path, file in document.files.items() if not (beside and path.startswith(beside + "/"))
    }
    for path in found:
        if not path.startswith("/") or posixpath.normpath(path) != path or not path.isprintable():
            raise InvalidArgument(f"mount {path[:80]!r}: expected an absolute path without .. in the guest")
    total = sum(len(file.content) for file in found.values())
    if total > MAX_FILES:
        path, largest = max(found.items(), key=lambda item: len(item[1].content))
        raise InvalidArgument(
            f"the ConfigMaps and Secrets that the pod mounts have {total} bytes, over {MAX_FILES}, which is "
            f"what a guest is told when it boots; the largest is {path} with {len(largest.content)}: leave "
            "out what it doesn't need, or take a volume"
        )
    if document.environment:
        found.setdefault(ENVIRONMENT, GuestFile(environment_file(document.environment).encode()))
    return found


def environment_file(environment: Mapping[str, str]) -> str:
    """Return the variables as lines that a shell can source, and systemd's EnvironmentFile= can read.

    Names that neither can have are left out."""
    lines = []
    for name, value in sorted(environment.items()):
        if _NAME.fullmatch(name) and "\0" not in value:
            if not _PLAIN.fullmatch(value):
                value = '"' + re.sub(r'(["\\$`])', r"\\\1", value) + '"'
            lines.append(f"{name}={value}\n")
    return "".join(lines)
