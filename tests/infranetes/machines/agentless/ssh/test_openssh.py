# SPDX-License-Identifier: Apache-2.0
"""OpenSSH's server, as most guests have it."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from infranetes.machines.agentless.access import IGuestAccess
from infranetes.machines.agentless.ssh.access import Login, SshAccess
from tests.contract.guest_access import GuestAccessContract, reactor
from tests.harness.needs import needs_programs, needs_root
from tests.support.sshd import Sshd


@needs_root
@needs_programs("sshd")
class OpenSshContractTests(GuestAccessContract, TestCase):
    """The contract of all ways into a guest."""

    async def make_access(self) -> IGuestAccess:
        self.sshd = Sshd().start()
        self.addCleanup(self.sshd.stop)
        login = Login(
            "127.0.0.1", "root", self.sshd.user_key.private, self.sshd.host_key.public, self.sshd.port
        )
        return SshAccess(reactor, login, "sandbox 1")

    async def cut(self) -> None:
        self.sshd.cut()
