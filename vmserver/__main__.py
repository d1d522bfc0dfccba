# SPDX-License-Identifier: Apache-2.0
"""The agent's program, which starts sooner than `twistd --nodaemon --pidfile= vmserver OPTION...`.

    python3 -P -m vmserver OPTION...

A cloud's pod waits until its agent listens, and nearly all of that time Python loads modules. So other
plug-ins of twistd are not looked for, and garbage, of which there is hardly any until then, is not collected.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twisted.application.service import IService, ServiceMaker
    from twisted.python.usage import Options


class LoadedPlugin:
    """The plug-in as twistd takes the service from it. Garbage is collected once that is made."""

    def __init__(self, maker: ServiceMaker) -> None:
        self._maker = maker
        self.tapname = maker.tapname

    def makeService(self, options: Options) -> IService:
        made: IService = self._maker.makeService(options)
        gc.freeze()  # modules are never garbage
        gc.enable()
        return made


def main(arguments: Sequence[str]) -> None:
    """Run the agent. :param arguments: the options of `twistd vmserver`."""
    gc.disable()
    from twisted.application import app
    from twisted.scripts import twistd

    from twisted.plugins.vmserver_plugin import vmserver as maker

    class ServerOptions(twistd.ServerOptions):  # type: ignore[name-defined, misc]
        loadedPlugins = {maker.tapname: LoadedPlugin(maker)}  # noqa: RUF012  twistd wants it so
        subCommands = ((maker.tapname, None, lambda: maker.options(), maker.description),)

    sys.argv[1:] = ["--nodaemon", "--pidfile=", maker.tapname, *arguments]
    app.run(twistd.runApp, ServerOptions)


if __name__ == "__main__":
    main(sys.argv[1:])
