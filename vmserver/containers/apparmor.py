# SPDX-License-Identifier: Apache-2.0
"""The node's AppArmor profiles, loaded into the VM's kernel when a container needs one.

A reference, as the node sends it, is a profile's name followed by the lines of the file that defines it. The
file may include those of Debian's package apparmor in /etc/apparmor.d. Sources: apparmor_parser(8),
securityfs' apparmor/profiles.
"""

from __future__ import annotations

import re
from pathlib import Path

from twisted.internet.defer import DeferredLock
from twisted.internet.interfaces import IReactorThreads

from infranetes_common.commands import Command, thd_run
from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import FailedPrecondition, InfranetesError, InvalidArgument

MAX_POLICY_BYTES = 256 * 1024

_FIELD = "security_context.apparmor"
_NAME = re.compile(r"[\x21-\x7e]{1,255}")
_SECONDS = 60.0
_PROFILES = Path("/sys/kernel/security/apparmor/profiles")


def split_reference(reference: str) -> tuple[str, str]:
    """Return a profile's name and the file that defines it.

    :raise InvalidArgument: the name is invalid, or the file is missing or too large."""
    name, _, policy = reference.partition("\n")
    if not _NAME.fullmatch(name):
        raise InvalidArgument(f"{_FIELD}: {name[:80]!r} is not the name of a profile")
    if not policy:
        raise InvalidArgument(f"{_FIELD}: the node sent no profile {name}")
    if len(policy.encode()) > MAX_POLICY_BYTES:
        raise InvalidArgument(f"{_FIELD}: the file of profile {name} has over {MAX_POLICY_BYTES} bytes")
    return name, policy


class ProfileLoader:
    """Loads profiles into the kernel.

    :param listed: the file in which the kernel lists loaded profiles. :param parser: the program."""

    def __init__(
        self, reactor: IReactorThreads, listed: Path = _PROFILES, parser: str = "apparmor_parser"
    ) -> None:
        self._reactor = reactor
        self._parser = parser
        self._listed = listed
        self._lock = DeferredLock()
        self._loaded: dict[str, str] = {}  # the loaded file of each profile

    async def load(self, reference: str) -> None:
        """Load a profile unless it is loaded already.

        :raise FailedPrecondition: the VM has no AppArmor.
        :raise InvalidArgument: the file can't be loaded, or does not define the profile."""
        name, policy = split_reference(reference)
        async with self._lock:
            if self._loaded.get(name) != policy:
                await run_in_thread(self._reactor, self._thd_load, name, policy)
                self._loaded[name] = policy

    def _thd_load(self, name: str, policy: str) -> None:
        if not self._listed.exists():
            raise FailedPrecondition(
                f"{_FIELD}: the VM has no AppArmor, so the node's profile {name} can't be loaded; "
                "use RuntimeDefault or none"
            )
        try:
            done = thd_run(Command([self._parser, "--replace"], _SECONDS, policy.encode()))
        except InfranetesError as error:
            raise FailedPrecondition(f"{_FIELD}: profile {name} can't be loaded: {error}") from None
        if done.code:
            raise InvalidArgument(f"{_FIELD}: profile {name} can't be loaded: {done.message()}")
        loaded = self._listed.read_text(errors="replace").splitlines()
        if not any(line.rpartition(" (")[0] == name for line in loaded):
            raise InvalidArgument(f"{_FIELD}: the node's file defines no profile {name}")
