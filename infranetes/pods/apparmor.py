"""AppArmor profiles that are the node's: found in its files, for the VM's kernel to load.

A profile is asked for by its name; on other nodes the kernel knows it already. Here the kernel is the VM's,
so the file that defines the profile goes there. What it includes comes from the VM's own /etc/apparmor.d.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path

from infranetes_common import cri
from infranetes_common.errors import FailedPrecondition, InvalidArgument

DEFAULT_DIRECTORY = Path("/etc/apparmor.d")
MAX_BYTES = 256 * 1024  # of a file
MAX_FILES = 4096

_FIELD = "config.linux.security_context.apparmor"
_LOCALHOST = cri.SecurityProfile.Localhost
_PREFIX = "localhost/"
_NAME = re.compile(r"[\x21-\x7e]{1,255}")


def name(config: cri.ContainerConfig) -> str:
    """The profile of the node that is asked for; "": none is.

    :raise InvalidArgument: nothing that a profile could be called."""
    context = config.linux.security_context
    if context.HasField("apparmor"):
        if context.apparmor.profile_type != _LOCALHOST:
            return ""
        found = context.apparmor.localhost_ref
    elif context.apparmor_profile.startswith(_PREFIX):
        found = context.apparmor_profile
    else:
        return ""
    found = found.removeprefix(_PREFIX)
    if not _NAME.fullmatch(found):
        raise InvalidArgument(f"{_FIELD}: {found[:80]!r} is no profile's name")
    return found


def find(directory: Path, profile: str) -> str:
    """The text of the file in `directory` that defines the profile. Blocks.

    :raise FailedPrecondition: there is none; says where it is looked for."""
    # As apparmor.d(5) has it: [profile] NAME [attachment] [flags=(...)] {, the name in quotes or not.
    defines = re.compile(rf'^[ \t]*(?:profile[ \t]+)?"?{re.escape(profile)}"?[ \t][^\n#]*\{{', re.MULTILINE)
    for path in sorted(_files(directory)):
        with contextlib.suppress(OSError):
            text = _text(path)
            if defines.search(text):
                return text
    raise FailedPrecondition(
        f"{_FIELD}: no file in {directory} of this node defines the profile {profile}: put it there, "
        "or ask for RuntimeDefault"
    )


def _files(directory: Path) -> list[Path]:
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        return [Path(each.path) for each in entries if not each.name.startswith(".")][:MAX_FILES]
    return []


def _text(path: Path) -> str:
    """Nothing, if it is no file or too large. :raise OSError: it can't be read."""
    # Without O_NONBLOCK a pipe would be waited for.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return ""
        data = file.read(MAX_BYTES + 1)
    return data.decode(errors="replace") if len(data) <= MAX_BYTES else ""


def put(config: cri.ContainerConfig, profile: str, text: str) -> cri.ContainerConfig:
    """A copy of `config` whose reference is the name and, on the lines after it, the file."""
    sent = cri.ContainerConfig()
    sent.CopyFrom(config)
    context = sent.linux.security_context
    context.ClearField("apparmor_profile")
    context.apparmor.profile_type = _LOCALHOST
    context.apparmor.localhost_ref = f"{profile}\n{text}"
    return sent
