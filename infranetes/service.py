# SPDX-License-Identifier: Apache-2.0
"""``twistd infranetes --config FILE``: the node daemon as a Twisted service."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

from twisted.application.service import Service
from twisted.internet.defer import Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from infranetes import config as configuration
from infranetes.config import Reading
from infranetes.config.in_force import ConfigInForce
from infranetes.config.schema import FORMATS, LEVELS
from infranetes.daemon.assembly import Daemon
from infranetes.daemon.reload import Reload
from infranetes.daemon.service_manager import ServiceManager
from infranetes_common.commandline import DaemonOptions
from infranetes_common.concurrency import start
from infranetes_common.errors import ConfigError, InfranetesError
from infranetes_common.hangups import Hangups
from infranetes_common.logging import LoggedService, LogOutput
from infranetes_common.reactors import IReactor, installed

# Allocations until the youngest objects are collected, then collections until each older generation is.
GC_THRESHOLDS = (5_000, 10, 20)

_log = Logger()


def _subnets(text: str) -> tuple[str, ...]:
    return tuple(each.strip() for each in text.split(","))


class Options(DaemonOptions):
    """The command line. A flag overrides the file's key."""

    name = "infranetes"
    optParameters = [  # noqa: RUF012  usage.Options wants it so
        ["config", "c", None, "The configuration, a TOML file; without one, every key has its default."],
        ["listen", "l", None, "The CRI socket: a path or unix://PATH (socket)."],
        [
            "podprovider",
            "p",
            None,
            "Makes the VMs: qemu, aws, azure, gcp, openstack, vsphere, libcloud, simulated or a plug-in "
            "(provider).",
        ],
        [
            "imgprovider",
            None,
            None,
            "Whose images pods are made of: docker, systemd, or a cloud's own, by its name (imgprovider).",
        ],
        [
            "contprovider",
            None,
            None,
            "What runs containers in the VMs: docker or oci; unless given, the guest image's (contprovider).",
        ],
        ["ca", None, None, "The CA of the VMs' certificates: PEM, certificate and key (ca)."],
        ["master-ip", None, None, "The address of Kubernetes' API server (kubernetes.master_ip)."],
        [
            "cluster-cidr",
            None,
            None,
            "The cluster's subnets, with commas between (kubernetes.cluster_cidrs).",
        ],
        ["kubeconfig", None, None, "How to reach Kubernetes, a file (kubernetes.kubeconfig)."],
        [
            "base-ip",
            None,
            None,
            "The pods' subnet here by its first three numbers (providers.NAME.pod_cidr).",
        ],
        ["state-dir", None, None, "What is kept over reboots (state_dir)."],
        ["run-dir", None, None, "What is gone after a reboot (run_dir)."],
        ["cluster", None, None, "The cluster that this node belongs to (cluster)."],
        ["node", None, None, "This node's name (node)."],
        ["log-format", None, None, f"{' or '.join(FORMATS)} (log.format)."],
        ["log-level", None, None, f"{', '.join(LEVELS)} (log.level)."],
    ]

    _KEYS = (
        ("listen", "socket", str),
        ("podprovider", "provider", str),
        ("imgprovider", "imgprovider", str),
        ("contprovider", "contprovider", str),
        ("ca", "ca", str),
        ("master-ip", "kubernetes.master_ip", str),
        ("cluster-cidr", "kubernetes.cluster_cidrs", _subnets),
        ("kubeconfig", "kubernetes.kubeconfig", str),
        ("base-ip", "base_ip", str),
        ("state-dir", "state_dir", Path),
        ("run-dir", "run_dir", Path),
        ("cluster", "cluster", str),
        ("node", "node", str),
        ("log-format", "log.format", str),
        ("log-level", "log.level", str),
    )

    reading: Reading
    read_again: Callable[[], Reading]

    def postOptions(self) -> None:
        """Read the file, so that its errors are reported before the daemon starts."""
        flags = {key: kind(self[flag]) for flag, key, kind in self._KEYS if self[flag] is not None}
        # The file may be read again after twistd has changed the directory.
        path = os.path.abspath(self["config"]) if self["config"] else None
        self.read_again = lambda: configuration.read(path, flags)
        try:
            self.reading = self.read_again()
        except InfranetesError as error:
            raise SystemExit(f"infranetes: {error}") from None


def makeService(options: Options) -> Service:
    """Make the daemon. If that fails, end the process with one line that says why.

    It happens before twistd goes into the background, where only the log could say so."""
    reactor = installed()
    config = options.reading.config
    hangups = Hangups(reactor)
    hangups.install()
    try:
        output = LogOutput(config.log.format, config.log.level)
        service = LoggedService(output)
        process = Infranetes(reactor, options, output, hangups)
        process.setServiceParent(service)  # type: ignore[no-untyped-call]
    except ConfigError as error:
        raise SystemExit(f"infranetes: {options.reading.sources.placed(error)}") from None
    except InfranetesError as error:
        raise SystemExit(f"infranetes: {error}") from None
    return service


class Infranetes(Service):
    """The daemon as a process: its exit status, SIGHUP, the garbage collector."""

    def __init__(self, reactor: IReactor, options: Options, output: LogOutput, hangups: Hangups) -> None:
        self._reactor = reactor
        self._hangups = hangups
        config, source = options.reading.config, options.reading.sources.main
        manager = ServiceManager()
        config_in_force = ConfigInForce(options.reading)
        self._daemon = Daemon(reactor, config, manager, source=source, config_in_force=config_in_force)
        self._reload = Reload(reactor, self._daemon, manager, output, config_in_force, options.read_again)

    def startService(self) -> None:
        """Begin to start the daemon."""
        # Imported modules stay, so the collector need not look at them, and its pauses are shorter.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        Service.startService(self)
        start(self._start()).addErrback(self._failed)

    async def _start(self) -> None:
        await self._daemon.startService()
        self._hangups.serve(self._reload)
        line = await self._daemon.provider_started()
        _log.info("{line}", line=line)

    def _failed(self, failure: Failure) -> None:
        """Say in one line why the daemon can't do its work, and end with a status that is not 0."""
        if not self.running:
            return
        if failure.check(InfranetesError):
            _log.critical("infranetes can't start: {error}", error=failure.value)
        else:
            _log.failure("infranetes can't start", failure=failure)
        # The reactor has no exit status of its own.
        atexit.register(_exit_with_failure)
        if self._reactor.running:
            self._reactor.stop()
        else:
            self._reactor.callWhenRunning(self._reactor.stop)

    def stopService(self) -> Deferred[None]:
        """Stop the daemon. The VMs go on."""
        self._hangups.stop()
        Service.stopService(self)
        stopped: Deferred[None] = self._daemon.stopService()
        stopped.addErrback(lambda failure: _log.failure("infranetes did not stop cleanly", failure=failure))
        return stopped


def _exit_with_failure() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
