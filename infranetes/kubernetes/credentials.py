# SPDX-License-Identifier: Apache-2.0
"""The access that a kubeconfig gives, kept fresh.

Source: Kubernetes' "client-go credential plugins" (client.authentication.k8s.io v1 and v1beta1).
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import attrs

from infranetes.kubernetes.kubeconfig import Access, Plugin, thd_read
from infranetes_common.commands import Command, run
from infranetes_common.concurrency import Flight, run_in_thread
from infranetes_common.errors import FailedPrecondition
from infranetes_common.reactors import IReactor

FRESH_SECONDS = 60.0  # the files are read again after this
PLUGIN_SECONDS = 60.0
EARLY_SECONDS = 10.0  # new credentials are asked for so long before the old ones expire


def _utc() -> datetime:
    return datetime.now(UTC)


@attrs.frozen
class _Granted:
    """Credentials from a plug-in. :ivar ends_at: their expiry by the reactor's clock; None: not known."""

    asked: Access
    credential: Access
    ends_at: float | None


class Credentials:
    """The access that a kubeconfig gives at present.

    The kubeconfig and the files that it names are read again every minute. A plug-in's credentials are used
    until the expiry that it prints or, without one, until the API server refuses them.

    :param host: an address to use instead of the kubeconfig's; "": use that one.
    :param now: returns the time of day, in which plug-ins state the expiry of credentials.
    """

    def __init__(
        self, reactor: IReactor, kubeconfig: Path, host: str = "", now: Callable[[], datetime] = _utc
    ) -> None:
        self._reactor = reactor
        self._kubeconfig = kubeconfig
        self._host = host
        self._now = now
        self._access: Access | None = None
        self._read_at = 0.0
        self._granted: _Granted | None = None
        self._reading: Flight[Access] | None = None

    async def current(self) -> Access:
        """Return the present access. Concurrent callers share one read.

        :raise FailedPrecondition: the kubeconfig, or a file or command that it names, can't be used.
        """
        if self._access is not None and self._fresh():
            return self._access
        if self._reading is None or self._reading.done:
            self._reading = Flight(self._read())
        return await self._reading.join()

    def unreachable(self) -> None:
        """Note a failed connection: read the files again, and drop a plug-in's certificate. Idempotent."""
        self._access = None
        if self._granted is not None and self._granted.credential.key:
            self._granted = None

    def refused(self) -> None:
        """Record that the API server refused the credentials, so that new ones are got. Idempotent."""
        self._access = self._granted = None

    def _fresh(self) -> bool:
        if self._granted is not None and self._expired(self._granted):
            return False
        return self._reactor.seconds() - self._read_at < FRESH_SECONDS

    async def _read(self) -> Access:
        access = await run_in_thread(self._reactor, thd_read, self._kubeconfig, self._host)
        if access.plugin is not None:
            access = await self._from_plugin(access, access.plugin)
        self._access, self._read_at = access, self._reactor.seconds()
        return access

    async def _from_plugin(self, access: Access, plugin: Plugin) -> Access:
        before = self._granted
        if before is not None and before.asked == access and not self._expired(before):
            return before.credential
        # Libraries that are there for the daemon alone are not the plug-in's: see docs/tracing.md.
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment = {**inherited, **plugin.environment, "KUBERNETES_EXEC_INFO": _request(access, plugin)}
        done = await run(self._reactor, Command(plugin.command, PLUGIN_SECONDS, environment=environment))
        if done.code:
            raise FailedPrecondition(
                f"{plugin.command[0]}, which the kubeconfig names, returned no credentials: {done.message()}"
            )
        credential, ends = _granted(access, plugin, done.stdout)
        ends_at = None if ends is None else self._reactor.seconds() + (ends - self._now()).total_seconds()
        self._granted = _Granted(access, credential, ends_at)
        return credential

    def _expired(self, granted: _Granted) -> bool:
        ends_at = granted.ends_at
        return ends_at is not None and self._reactor.seconds() >= ends_at - EARLY_SECONDS


def _request(access: Access, plugin: Plugin) -> str:
    """Return the ExecCredential that a plug-in receives in an environment variable."""
    spec: dict[str, object] = {"interactive": False}
    if plugin.told_cluster:
        known = {
            "server": access.server,
            "tls-server-name": access.server_name,
            "certificate-authority-data": base64.b64encode(access.authority).decode(),
            "config": plugin.cluster_config,
        }
        spec["cluster"] = {key: value for key, value in known.items() if value}
    return json.dumps({"apiVersion": plugin.version, "kind": "ExecCredential", "spec": spec})


def _granted(access: Access, plugin: Plugin, printed: bytes) -> tuple[Access, datetime | None]:
    """Read the credentials that a plug-in has printed; return them and their expiry, if it names one."""
    try:
        content = json.loads(printed)
        status = content["status"]
        token, certificate, key, ends = (
            status.get(name) or ""
            for name in ("token", "clientCertificateData", "clientKeyData", "expirationTimestamp")
        )
        if content.get("apiVersion") != plugin.version or not isinstance(token, str):
            raise ValueError
        if not (token or certificate) or bool(certificate) != bool(key):
            raise ValueError
        credential = attrs.evolve(access, token=token)
        if certificate:
            credential = attrs.evolve(credential, certificate=certificate.encode(), key=key.encode())
        return credential, _time(ends) if ends else None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise FailedPrecondition(
            f"{plugin.command[0]}, which the kubeconfig names, printed no ExecCredential of {plugin.version}"
        ) from None


def _time(text: str) -> datetime:
    time = datetime.fromisoformat(text)
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)
