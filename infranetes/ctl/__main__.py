# SPDX-License-Identifier: Apache-2.0
"""The executable `infranetes-ctl`: the commands of `ctl.cli`, with the daemon's own check of keys."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from infranetes.ctl import completing

if TYPE_CHECKING:
    from infranetes.config import Config


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == [completing.COMMAND]:
        return completing.main(given[1:])
    # Imported late: a shell that completes a name waits for it.
    from infranetes.ctl import cli

    return cli.main(given, _make)


def _make(config: Config, source: str) -> None:
    """Make the parts of a daemon.

    :raise ConfigError: they can't be made of this configuration."""
    # Imported late: this is all of the daemon, and other commands start faster without it.
    from infranetes.daemon.config_check import check_daemon
    from infranetes_common.reactors import installed

    check_daemon(installed(), config, source)


if __name__ == "__main__":
    sys.exit(main())
