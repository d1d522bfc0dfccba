# SPDX-License-Identifier: Apache-2.0
"""Small files in a directory of a POSIX guest, by a script in its shell: for all ways that can run one.

The script and the archive that it reads make the directory have exactly the files of the archive. It needs a
shell, tar, find, and what every system has; Busybox does.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from typing import NoReturn

from infranetes.machines.agentless.access import GuestFile
from infranetes_common.errors import FailedPrecondition, InvalidArgument, NotOffered, ResourceExhausted
from infranetes_common.wire import vmserver

MAX_NAME, MAX_PATH = 255, 4000  # bytes
_NEW = ".infranetes-new"  # what has arrived, until all has; left by a script that was killed

# What it finds in the directory may have any name, so no name of that passes through a pipe. A link to a
# directory goes first: mv would move a file through it.
_SCRIPT = rf"""
set -eu
umask 022
mkdir -p -- "$1"
cd -- "$1"
rm -rf {_NEW}
trap 'rm -rf {_NEW}' EXIT
mkdir -m 700 {_NEW}
tar -xf - -C {_NEW}
find . -path ./{_NEW} -prune -o ! -type d -exec sh -c '
    for each do [ -f "{_NEW}/$each" ] && [ ! -d "$each" ] || rm -f -- "$each"; done' sh {{}} +
find . -depth -type d ! -path ./{_NEW} ! -path "./{_NEW}/*" -exec sh -c '
    for each do [ -d "{_NEW}/$each" ] || rm -rf -- "$each"; done' sh {{}} +
(cd {_NEW} && find . -type d) | while IFS= read -r each; do
    mkdir -p -- "$each"
done
(cd {_NEW} && find . -type f) | while IFS= read -r each; do
    mv -f -- "{_NEW}/$each" "$each"
done
"""


def command(directory: str) -> tuple[str, ...]:
    """Return the command that reads an archive from its standard input.

    :raise InvalidArgument: `directory` is no path that leads to one."""
    parts = directory.split("/")
    if not directory.startswith("/") or not any(parts) or ".." in parts:
        raise InvalidArgument(
            f"{directory[:200]!r} is no directory for files: give an absolute path without .., and not /"
        )
    _encoded(directory)
    return ("/bin/sh", "-c", _SCRIPT, "sh", directory)


# A file that others may have open, or have mounted, is replaced whole where that can be.
_FILE_SCRIPT = r"""
set -eu
mkdir -p -- "$(dirname -- "$1")"
umask 077
new=$1.infranetes-new
cat >"$new"
chmod "$2" "$new"
mv -f -- "$new" "$1" || { cat "$new" >"$1"; rm -f -- "$new"; }
"""


def file_command(path: str, file: GuestFile) -> tuple[str, ...]:
    """Return the command that makes one file of its standard input.

    :raise InvalidArgument: `path` is no path of a file."""
    parts = path.split("/")
    if not path.startswith("/") or not parts[-1] or ".." in parts:
        raise InvalidArgument(f"{path[:200]!r} is no file: give an absolute path without ..")
    _encoded(path)
    return ("/bin/sh", "-c", _FILE_SCRIPT, "sh", path, f"{file.mode & 0o777:o}")


def archive(files: Mapping[str, GuestFile], seconds: float) -> bytes:
    """Return an archive of files.

    :param seconds: their time, since 1970. :raise InvalidArgument: a path leads out of the directory."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        directories: set[str] = set()
        for path, file in sorted(files.items()):
            parts = _parts(path)
            for depth in range(1, len(parts)):
                above = "/".join(parts[:depth])
                if above in files:
                    raise InvalidArgument(f"{above[:200]!r} is a file, and a directory for {path[:200]!r}")
                if above not in directories:
                    directories.add(above)
                    tar.addfile(_entry(above, 0o755, seconds, tarfile.DIRTYPE))
            entry = _entry(path, file.mode & 0o777, seconds, tarfile.REGTYPE)
            entry.size = len(file.content)
            tar.addfile(entry, io.BytesIO(file.content))
    return out.getvalue()


def _entry(path: str, mode: int, seconds: float, kind: bytes) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(path)
    entry.mode, entry.mtime, entry.type = mode, int(seconds), kind
    return entry


def _parts(path: str) -> list[str]:
    parts = path.split("/")
    encoded = _encoded(path)
    if (
        any(part in ("", ".", "..") for part in parts)
        or parts[0] == _NEW
        or len(encoded) > MAX_PATH
        or any(len(part) > MAX_NAME for part in encoded.split(b"/"))
    ):
        raise InvalidArgument(f"{path[:200]!r} is no path below a directory")
    return parts


def _encoded(path: str) -> bytes:
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{path[:200]!r} is no text, so it can't be a path in a guest") from None
    if b"\0" in encoded or b"\n" in encoded:
        raise InvalidArgument(f"{path[:200]!r} has characters that a path in a guest can't have")
    return encoded


def check(result: vmserver.ExecSyncResponse, directory: str) -> None:
    """Check how the command has ended.

    :raise FailedPrecondition: the files are not there. :raise ResourceExhausted: there is no room."""
    if result.exit_code:
        _fail(directory, result.stderr[-1000:].decode(errors="replace").strip())


def _fail(directory: str, why: str) -> NoReturn:
    message = f"files can't be brought to {directory} of the guest: {why or 'no reason given'}"
    if "No space left" in why or "quota exceeded" in why.lower():
        raise ResourceExhausted(message)
    if "not found" in why or "No such file or directory" in why:
        raise NotOffered(f"{message}; that needs a shell, tar and find in the guest")
    raise FailedPrecondition(message)
