"""``twistd infranetes --config FILE``: the node daemon as a Twisted service."""

from __future__ import annotations

import atexit
import gc
import os
import socket
import sys
from pathlib import Path
from typing import Any

from twisted.application.service import Service
from twisted.internet.defer import Deferred
from twisted.logger import Logger
from twisted.python import usage
from twisted.python.failure import Failure

from infranetes import config as configuration
from infranetes.config import FORMATS, LEVELS, Config
from infranetes.daemon import Daemon
from infranetes.pods.waits import go
from infranetes_common.errors import InfranetesError
from infranetes_common.logging import LoggedService, observer

GC_THRESHOLDS = (5_000, 10, 20)  # objects until the youngest are collected, then how often the older

_log = Logger()


class Options(usage.Options):
    """The command line. A flag overrides the file's key."""

    optParameters = [  # noqa: RUF012  usage.Options wants it so
        ["config", "c", None, "The configuration, a TOML file; without one, every key has its default."],
        ["listen", "l", None, "The CRI socket: a path or unix://PATH (socket)."],
        ["podprovider", "p", None, "Who makes the VMs: qemu, simulated, or a plug-in's name (provider)."],
        [
            "imgprovider",
            None,
            None,
            "Whose images pods are made of: docker, systemd, or a cloud's own, by its name (imgprovider).",
        ],
        ["ca", None, None, "The CA of the VMs' certificates: PEM, certificate and key (ca)."],
        ["master-ip", None, None, "The address of Kubernetes' API server (kubernetes.master_ip)."],
        ["cluster-cidr", None, None, "The subnet of the cluster's pods (kubernetes.cluster_cidr)."],
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
        ("ca", "ca", str),
        ("master-ip", "kubernetes.master_ip", str),
        ("cluster-cidr", "kubernetes.cluster_cidr", str),
        ("kubeconfig", "kubernetes.kubeconfig", str),
        ("base-ip", "base_ip", str),
        ("state-dir", "state_dir", Path),
        ("run-dir", "run_dir", Path),
        ("cluster", "cluster", str),
        ("node", "node", str),
        ("log-format", "log.format", str),
        ("log-level", "log.level", str),
    )

    def postOptions(self) -> None:
        """Read the file, so that its faults are told before the daemon starts."""
        flags = {key: kind(self[flag]) for flag, key, kind in self._KEYS if self[flag] is not None}
        try:
            self.infranetes_config = configuration.load(self["config"], flags)
        except InfranetesError as error:
            raise SystemExit(f"infranetes: {error}") from None


def makeService(options: Options) -> Service:
    """The daemon, with what can fail at once done: before twistd goes into the background, where only
    the log would say why. Ends the process with one line where something is in the way."""
    from twisted.internet import reactor

    config = options.infranetes_config
    try:
        service = LoggedService(observer(config.log.format, config.log.level))
        daemon: Any = Infranetes(reactor, config)
        daemon.setServiceParent(service)
    except InfranetesError as error:
        raise SystemExit(f"infranetes: {error}") from None
    return service


class Infranetes(Service):
    """Starts and ends the daemon with the process."""

    def __init__(self, reactor: Any, config: Config) -> None:
        self._reactor = reactor
        self._daemon = Daemon(reactor, config, notify)
        self._daemon.prepare()
        self._starting: Deferred[None] | None = None

    def startService(self) -> None:
        """Begin; nothing is waited for here."""
        self._daemon.sign_lock()
        # What was imported stays: the collector need not look at it again, and has shorter pauses.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        super().startService()  # type: ignore[no-untyped-call]
        self._starting = go(self._start())
        self._starting.addErrback(self._failed)

    async def _start(self) -> None:
        await self._daemon.start(self._ready)
        self._daemon.provider_started.addErrback(self._failed)

    def _ready(self, line: str) -> None:
        _log.info("{line}", line=line)

    def _failed(self, failure: Failure) -> None:
        """The daemon can't do its work: say why in one line, and end with a status that is not 0."""
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
        """VMs go on."""
        super().stopService()  # type: ignore[no-untyped-call]
        stopped = go(self._daemon.stop())
        stopped.addErrback(lambda failure: _log.failure("infranetes did not stop cleanly", failure=failure))
        return stopped


def _exit_with_failure() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def notify(assignments: str) -> None:
    """Tell systemd (sd_notify(3)); nobody else asks."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as there:
            there.setblocking(False)
            there.sendto(assignments.encode(), address)
    except OSError as error:
        _log.debug("the service manager was not told: {error}", error=error)
