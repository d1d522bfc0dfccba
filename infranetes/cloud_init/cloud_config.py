# SPDX-License-Identifier: Apache-2.0
"""What Infranetes adds to a pod's user-data."""

from __future__ import annotations

import base64
import posixpath
import re
from collections.abc import Mapping

import yaml

from infranetes.cloud_init.boot_script import boot_script
from infranetes.cloud_init.document import GuestDocument, HostKey
from infranetes.cloud_init.multipart import Part
from infranetes.cloud_init.user_data import CLOUD_CONFIG, SHELL_SCRIPT
from infranetes.cloud_init.windows import windows_script
from infranetes.machines.agentless.access import GuestFile
from infranetes_common.errors import InvalidArgument

MAX_FILES = 2 << 20  # bytes of all files together
_FIRST_LINE = "#cloud-config\n"
_QUOTED = '"'
ENVIRONMENT = "/etc/cloud/environment"
# The pod's own values stay, and lists get longer.
_BESIDE = "list(append)+dict(no_replace,recurse_list)+str()"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLAIN = re.compile(r"[A-Za-z0-9_./:@%+,=-]*")


def parts(document: GuestDocument) -> list[Part]:
    """Return what is added to the pod's own documents, after them.

    :raise InvalidArgument: the files are too large, or have paths that no guest has."""
    files = _files(document)
    # Where the root stays, cloud-init would write them for the first pod alone.
    text = _write_files(files) if document.choices.windows or not document.root_stays else ""
    found = []
    if document.choices.windows:
        if script := windows_script(document):
            found.append(Part(script.encode(), SHELL_SCRIPT, "infranetes.ps1"))
    else:
        if script := boot_script(document, files):
            text += "bootcmd:\n- |\n  " + script.rstrip("\n").replace("\n", "\n  ") + "\n"
        config: dict[str, object] = {}
        if not document.hostname:
            config["preserve_hostname"] = True
        if document.root_stays:
            # The address and the card's own are another pod's after the first boot.
            config["updates"] = {"network": {"when": ["boot-new-instance", "boot"]}}
        if config:
            text += yaml.safe_dump(config)
        if document.host_key is not None:
            host_key = yaml.safe_dump(_host_key(document.host_key))
            found.append(Part((_FIRST_LINE + host_key).encode(), CLOUD_CONFIG, "infranetes-host-key.txt"))
    if text:
        found.insert(0, Part((_FIRST_LINE + text).encode(), CLOUD_CONFIG, "infranetes.txt", _BESIDE))
    return found


def _write_files(files: Mapping[str, GuestFile]) -> str:
    """Return the entries of the files as YAML. PyYAML would take a tenth of a second for 2 MiB."""
    found = ""
    for path, file in sorted(files.items()):
        found += (
            f"- path: {yaml.safe_dump(path, default_style=_QUOTED, width=2 * len(path) + 80).strip()}\n"
            f"  permissions: '{file.mode & 0o7777:04o}'\n"
            "  encoding: b64\n"
            f"  content: '{base64.b64encode(file.content).decode()}'\n"
        )
    return f"write_files:\n{found}" if found else ""


def _host_key(key: HostKey) -> dict[str, object]:
    # cloud-init then makes none itself, and removes those of the image.
    return {"ssh_keys": {"ed25519_private": key.private, "ed25519_public": key.public}}


def _files(document: GuestDocument) -> dict[str, GuestFile]:
    """Return what is written into the guest: the pod's files and its environment."""
    beside = document.choices.sysprep
    found = {
        path: file for path, file in document.files.items() if not (beside and path.startswith(beside + "/"))
    }
    for path in (*found, *(each.path for each in document.volumes if each.path)):
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
