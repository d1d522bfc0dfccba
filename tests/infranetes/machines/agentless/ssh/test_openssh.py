# SPDX-License-Identifier: Apache-2.0
"""OpenSSH's server, as most guests have it."""

from __future__ import annotations

from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from infranetes.machines.agentless.access import IGuestAccess
from infranetes.machines.agentless.ssh.access import Login, SshAccess
from infranetes.machines.agentless.ssh.keys import key_blob, make_key
from infranetes_common.errors import DeadlineExceeded, FailedPrecondition, Unavailable
from tests.contract.container_sessions import living
from tests.contract.guest_access import GuestAccessContract, reactor
from tests.harness.needs import needs_programs, needs_root
from tests.support.sshd import Sshd
from tests.support.waiting import until


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


@needs_root
@needs_programs("sshd")
class OpenSshTests(TestCase):
    """What is OpenSSH's own."""

    timeout = 60.0

    def serve(self, *options: str) -> Sshd:
        sshd = Sshd(*options).start()
        self.addCleanup(sshd.stop)
        return sshd

    def access(self, sshd: Sshd, host_key: str | None = None, **options: Any) -> SshAccess:
        known = sshd.host_key.public if host_key is None else host_key
        login = Login("127.0.0.1", "root", sshd.user_key.private, known, sshd.port, options.pop("sudo", None))
        access = SshAccess(reactor, login, "sandbox 1", **options)
        self.addCleanup(lambda: Deferred.fromCoroutine(access.close()))
        return access

    async def said(self, access: SshAccess, *command: str, stdin: bytes = b"") -> bytes:
        return (await access.run(command, 30, 0, 1 << 26, stdin)).stdout

    async def test_the_first_host_key_is_learned_and_another_one_refused_for_ever(self) -> None:
        sshd, learned = self.serve(), list[str]()
        access = self.access(sshd, "", learned=learned.append)
        self.assertEqual(await self.said(access, "echo", "one"), b"one\n")
        self.assertEqual([key_blob(line) for line in learned], [key_blob(sshd.host_key.public)])
        sshd.new_host_key()
        for _ in range(2):
            with self.assertRaisesRegex(FailedPrecondition, "another host key"):
                await self.said(access, "true")
        self.assertEqual(len(learned), 1)

    async def test_a_server_with_keys_of_another_kind_alone_is_not_spoken_to(self) -> None:
        sshd = self.serve()
        key = ec.generate_private_key(ec.SECP256R1()).public_key()
        line = key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
        with self.assertRaisesRegex(Unavailable, "no algorithms"):
            await self.said(self.access(sshd, line), "true")

    async def test_a_server_that_is_started_again_is_reached_again(self) -> None:
        sshd = self.serve()
        access = self.access(sshd)
        await access.answers(20)
        sshd.stop_process()
        with self.assertRaises(Unavailable):
            await self.said(access, "true")
        sshd.start()
        await access.answers(20)
        self.assertEqual(await self.said(access, "echo", "again"), b"again\n")

    async def test_a_key_that_is_not_let_in(self) -> None:
        sshd = self.serve()
        login = Login("127.0.0.1", "root", make_key().private, sshd.host_key.public, sshd.port)
        access = SshAccess(reactor, login, "sandbox 1")
        with self.assertRaisesRegex(Unavailable, "does not let root in"):
            await access.answers(20)
        await access.close()

    async def test_more_commands_than_a_connection_s_sessions(self) -> None:
        access = self.access(self.serve("MaxSessions 2"))
        running = [Deferred.fromCoroutine(self.said(access, "echo", str(number))) for number in range(7)]
        self.assertEqual([await each for each in running], [b"%d\n" % number for number in range(7)])

    async def test_keys_are_exchanged_anew_under_way(self) -> None:
        access = self.access(self.serve("RekeyLimit 1M"))
        data = bytes(range(256)) * 20_000
        self.assertTrue(await self.said(access, "cat", stdin=data) == data)

    async def test_without_sudo_in_the_guest_that_is_said(self) -> None:
        access = self.access(self.serve("SetEnv PATH=/nowhere"), sudo=True)
        with self.assertRaisesRegex(FailedPrecondition, "sudo"):
            await access.answers(20)

    async def test_with_sudo_commands_run_and_are_killed_by_it(self) -> None:
        sshd = self.serve()
        (sshd.root / "sudo").write_text(
            '#!/bin/sh\n[ "$1 $2" = "-n --" ] && shift 2 && exec setsid -w "$@"\n'
        )
        (sshd.root / "sudo").chmod(0o755)
        (sshd.root / ".bashrc").write_text(f"PATH={sshd.root}:$PATH\n")
        access = self.access(sshd, sudo=True)
        await access.answers(20)
        self.assertEqual(await self.said(access, "echo", "a b"), b"a b\n")
        with self.assertRaises(DeadlineExceeded):
            await access.run(["sleep", "671234"], 1, 0, 100)
        await until(lambda: not living("sleep", "671234"), "it is killed")
