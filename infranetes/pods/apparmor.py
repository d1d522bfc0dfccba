# SPDX-License-Identifier: Apache-2.0
"""AppArmor profiles of the node, found in its files for the VM's kernel to load.

A pod asks for a profile by name, which on other nodes the kernel knows already. Here the kernel is the VM's,
so the file that defines the profile is sent there. What it includes comes from the VM's own /etc/apparmor.d.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path

from infranetes_common.errors import FailedPrecondition, InvalidArgument
from infranetes_common.wire import cri

DEFAULT_DIRECTORY = Path("/etc/apparmor.d")
MAX_BYTES = 256 * 1024  # of a file
MAX_FILES = 4096

_FIELD = "config.linux.security_context.apparmor"
_LOCALHOST = cri.SecurityProfile.Localhost
_PREFIX = "localhost/"
_NAME = re.compile(r"[\x21-\x7e]{1,255}")


def profile_name(config: cri.ContainerConfig) -> str:
    """The name of the node's profile that the container asks for; "": none.

    :raise InvalidArgument: it can't be a profile's name."""
    context = config.linux.security_context
    if context.HasField("apparmor"):
        if context.apparmor.profile_type != _LOCALHOST:
            return ""
        name = context.apparmor.localhost_ref
    elif context.apparmor_profile.startswith(_PREFIX):
        name = context.apparmor_profile
    else:
        return ""
    name = name.removeprefix(_PREFIX)
    if not _NAME.fullmatch(name):
        raise InvalidArgument(f"{_FIELD}: {name[:80]!r} is no profile's name")
    return name


def find_profile(directory: Path, name: str) -> str:
    """The text of the file in `directory` that defines the profile. Blocks.

    :raise FailedPrecondition: there is none; says where it was looked for."""
    # See apparmor.d(5): [profile] NAME [attachment] [flags=(...)] {, the name in quotes or not.
    defines = re.compile(rf'^[ \t]*(?:profile[ \t]+)?"?{re.escape(name)}"?[ \t][^\n#]*\{{', re.MULTILINE)
    for path in sorted(_files(directory)):
        with contextlib.suppress(OSError):
            text = _text(path)
            if defines.search(text):
                return text
    raise FailedPrecondition(
        f"{_FIELD}: no file in {directory} of this node defines the profile {name}: put it there, "
        "or ask for RuntimeDefault"
    )


def _files(directory: Path) -> list[Path]:
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        return [Path(each.path) for each in entries if not each.name.startswith(".")][:MAX_FILES]
    return []


def _text(path: Path) -> str:
    """The file's text; "": it is no regular file, or too large. :raise OSError: it can't be read."""
    # Without O_NONBLOCK opening a pipe blocks.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return ""
        data = file.read(MAX_BYTES + 1)
    return data.decode(errors="replace") if len(data) <= MAX_BYTES else ""


def with_profile(config: cri.ContainerConfig, name: str, text: str) -> cri.ContainerConfig:
    """A copy of `config` whose reference is the name, followed by the file's text on the lines after it."""
    sent = cri.ContainerConfig()
    sent.CopyFrom(config)
    context = sent.linux.security_context
    context.ClearField("apparmor_profile")
    context.apparmor.profile_type = _LOCALHOST
    context.apparmor.localhost_ref = f"{name}\n{text}"
    return sent
