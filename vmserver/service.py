# SPDX-License-Identifier: Apache-2.0
"""``twistd vmserver``: its options, and the service that they make."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import cast

from twisted.application.service import Service

from infranetes_common import reactors
from infranetes_common.commandline import DaemonOptions
from infranetes_common.config_files import Sources
from infranetes_common.errors import ConfigError, FailedPrecondition
from infranetes_common.hangups import Hangups
from infranetes_common.logging import LoggedService, file_output, observer
from vmserver import config as configuration
from vmserver.config import Config
from vmserver.daemon import Vmserver
from vmserver.machine import mount_namespace

# Names of the earlier Go version: its `fake` is the provider whose container is the machine.
EARLIER_PROVIDERS = {"fake": "machine"}


class Options(DaemonOptions):
    """The command line of ``twistd vmserver``. A flag overrides the file's key of the same name."""

    name = "vmserver"
    optParameters = [  # noqa: RUF012  usage.Options wants it so
        ["config", "c", None, "The configuration, a TOML file; without one, every key has its default."],
        [
            "provider",
            None,
            None,
            "What runs containers: docker, oci, systemd, machine, fake or a plug-in (provider).",
        ],
        ["contprovider", None, None, "The same as --provider, by its earlier names: fake is machine."],
        ["listen", None, None, "HOST:PORT of the TLS listener, in place of the identity's (listen)."],
        ["cert", None, None, "The machine's certificate and its CA's, PEM (identity.cert); with --key."],
        ["key", None, None, "The certificate's private key, PEM, mode 0600 (identity.key); with --cert."],
        [
            "run-dir",
            None,
            None,
            "Where identity and sandbox files are kept until the machine's end (run_dir).",
        ],
    ]

    read_again: Callable[[], Config]
    vmserver_config: Config
    sources: Sources

    def postOptions(self) -> None:
        """Read the file, so that its faults are reported before the daemon starts.

        :raise SystemExit: with the words, status 1; after a UsageError Debian's twistd exits with 0.
        """
        try:
            flags = {
                "provider": self._provider(),
                "listen": self["listen"],
                "run_dir": self["run-dir"],
                "identity.cert": self["cert"],
                "identity.key": self["key"],
            }
            if self["cert"] is not None or self["key"] is not None:
                flags["identity.source"] = configuration.CERTIFICATE
            # Absolute, since twistd changes its working directory before the file is read again.
            path = os.path.abspath(self["config"]) if self["config"] else None
            self.read_again = lambda: configuration.load(path, flags)
            self.vmserver_config, self.sources = configuration.read(path, flags)
        except ConfigError as error:
            raise SystemExit(f"vmserver: {error}") from None

    def _provider(self) -> str | None:
        earlier = self["contprovider"]
        names = {self["provider"], EARLIER_PROVIDERS.get(earlier, earlier)} - {None}
        if len(names) > 1:
            raise ConfigError("command line: --provider and --contprovider mean the same; give one")
        return cast("str | None", next(iter(names), None))


def makeService(options: Options) -> Service:
    """Make the agent as a Twisted service.

    :raise SystemExit: the ContainerProvider can't be made, or the mount namespace is not there; says why.
    """
    reactor = reactors.installed()
    if options.vmserver_config.mount_namespace:
        try:
            mount_namespace.join(options.vmserver_config.mount_namespace)
        except FailedPrecondition as error:
            raise SystemExit(f"vmserver: {error}") from None
    hangups = Hangups(reactor)
    hangups.install()
    try:
        agent = Vmserver(
            reactor,
            options.vmserver_config,
            hangups=hangups,
            read_again=options.read_again,
            source=options.sources.main,
        )
        path = options.vmserver_config.log_file
        service = LoggedService(observer(stream=file_output(path) if path else None))
    except ConfigError as error:
        raise SystemExit(f"vmserver: {options.sources.placed(error)}") from None
    agent.setServiceParent(service)  # type: ignore[no-untyped-call]
    return service
