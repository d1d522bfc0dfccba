# SPDX-License-Identifier: Apache-2.0
"""The node's AppArmor profiles: finding a profile's file, so that the VM's kernel can load it.

A pod asks for a profile by name. On an ordinary node the kernel has loaded it already; here the kernel is the
VM's, so the file that defines the profile is sent to the VM. Includes are read from the VM's /etc/apparmor.d.
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
MAX_BYTES = 256 * 1024  # the largest file that is read
MAX_FILES = 4096

_FIELD = "config.linux.security_context.apparmor"
_LOCALHOST = cri.SecurityProfile.Localhost
_PREFIX = "localhost/"
_NAME = re.compile(r"[\x21-\x7e]{1,255}")


def profile_name(config: cri.ContainerConfig) -> str | None:
    """Return the name of the node's profile that the container asks for; None: it asks for none.

    :raise InvalidArgument: it can't be a profile's name."""
    context = config.linux.security_context
    if context.HasField("apparmor"):
        if context.apparmor.profile_type != _LOCALHOST:
            return None
        name = context.apparmor.localhost_ref
    elif context.apparmor_profile.startswith(_PREFIX):
        name = context.apparmor_profile
    else:
        return None
    name = name.removeprefix(_PREFIX)
    if not _NAME.fullmatch(name):
        raise InvalidArgument(f"{_FIELD}: {name[:80]!r} is no profile's name")
    return name


def find_profile(directory: Path, name: str) -> str:
    """Return the text of the file in `directory` that defines the profile. Blocks.

    :raise FailedPrecondition: no file defines it; the message names the directory."""
    # See apparmor.d(5): [profile] NAME [attachment] [flags=(...)] {, where NAME may be quoted.
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
        return [Path(entry.path) for entry in entries if not entry.name.startswith(".")][:MAX_FILES]
    return []


def _text(path: Path) -> str:
    """Return the file's text, or "" if it is not a regular file or is too large.

    :raise OSError: the file can't be read."""
    # Without O_NONBLOCK, opening a FIFO would block.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return ""
        data = file.read(MAX_BYTES + 1)
    return data.decode(errors="replace") if len(data) <= MAX_BYTES else ""


def with_profile(config: cri.ContainerConfig, name: str, text: str) -> cri.ContainerConfig:
    """Return a copy of `config` whose profile reference is the name, then the file's text on new lines."""
    sent = cri.ContainerConfig()
    sent.CopyFrom(config)
    context = sent.linux.security_context
    context.ClearField("apparmor_profile")
    context.apparmor.profile_type = _LOCALHOST
    context.apparmor.localhost_ref = f"{name}\n{text}"
    return sent
