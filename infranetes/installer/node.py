# SPDX-License-Identifier: Apache-2.0
"""The node that is installed on: its files, below a directory, and the programs that run in its root."""

from __future__ import annotations

import os
import sys
from pathlib import Path, PurePosixPath
from typing import Protocol

from infranetes_common.commands import Command, thd_run
from infranetes_common.errors import FailedPrecondition, InfranetesError

SYSTEMCTL_SECONDS = 180.0
# warnings: which execvp imports, when there are no modules any more.
_ENTER = (
    "import os, sys, warnings; os.chroot(sys.argv[1]); os.chdir('/'); os.execvp(sys.argv[2], sys.argv[2:])"
)


class Programs(Protocol):
    """Runs programs in the node's root."""

    def run(self, *words: str, seconds: float = SYSTEMCTL_SECONDS) -> str:
        """Run a program to its end; return its output.

        :raise InfranetesError: it failed, or was late; the message has its own words."""


class ChrootPrograms:
    """Runs programs in a root, with this process's own rights and namespaces.

    The node's /proc and /run have to be there: systemctl talks to the node's systemd by a socket in /run.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._environment = {"SYSTEMD_IGNORE_CHROOT": "1", "SYSTEMD_PAGER": ""}

    def run(self, *words: str, seconds: float = SYSTEMCTL_SECONDS) -> str:
        """See `Programs.run`."""
        entered = words
        if self._root != Path("/"):
            entered = (sys.executable, "-I", "-c", _ENTER, str(self._root), *words)
        command = Command(entered, seconds, environment=self._environment)
        done = thd_run(command)
        if done.code:
            raise InfranetesError(f"`{' '.join(words)}` {done.how}: {done.message()}")
        return done.stdout.decode(errors="replace")


class Files:
    """The node's files, named as on the node.

    No path may leave the root by a symbolic link: the node's files are a stranger's to a container.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, name: str) -> Path:
        """Return where a file of the node is.

        :raise FailedPrecondition: a directory on the way is a link out of the root."""
        if not name.startswith("/") or ".." in PurePosixPath(name).parts:
            raise FailedPrecondition(f"{name!r} is no absolute path of a file on the node")
        path = self.root / name.lstrip("/")
        real, top = os.path.realpath(path.parent), os.path.realpath(self.root)
        if os.path.commonpath((real, top)) != top:
            raise FailedPrecondition(
                f"{name} leads out of {self.root}, to {real}: a directory on its way is a link"
            )
        return path

    def missing_directories(self, name: str) -> list[str]:
        """Return the directories that have to be made for a file, the outer ones first."""
        parents = list(PurePosixPath(name).parents)[:-1]  # the root itself is there
        return [str(each) for each in reversed(parents) if not self.path(str(each)).is_dir()]

    def text(self, name: str) -> str | None:
        """Return a file's content; None: there is none."""
        try:
            return self.path(name).read_text()
        except (FileNotFoundError, NotADirectoryError):
            return None
