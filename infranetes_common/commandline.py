# SPDX-License-Identifier: Apache-2.0
"""The parts that both daemons' command lines have in common."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from twisted.python import usage

import twisted
from infranetes_common import __version__


class DaemonOptions(usage.Options):
    """The command line of ``twistd NAME``. Errors are shown in one line.

    :cvar name: the daemon's name.
    """

    name = ""

    def parseOptions(self, options: Sequence[str] | None = None) -> None:
        """Parse the command line.

        :raise SystemExit: with the error's message, which twistd would print below all of its help.
        """
        try:
            super().parseOptions(options)  # type: ignore[no-untyped-call]
        except usage.UsageError as error:
            words = str(error).rstrip(".")
            raise SystemExit(f"{self.name}: {words}; twistd {self.name} --help shows what there is") from None

    def getSynopsis(self) -> str:
        """Return the first line of the help."""
        return f"Usage: twistd [options of twistd] {self.name} [options]"

    def opt_version(self) -> None:
        """Display the version and exit."""
        print(f"{self.name} {__version__} (Twisted {twisted.__version__})")
        sys.exit(0)
