# SPDX-License-Identifier: Apache-2.0
"""Reports by the kernel's configfs-tsm, which a directory stands in for, and the agent's call for them."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any, cast

from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.attestation import MOST_REPORT, binding
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, InvalidArgument, Unavailable, Unimplemented
from infranetes_common.wire import vmserver as messages
from tests.support.inline_threads import InlineThreads
from tests.vmserver.harness import SANDBOX, run_directory
from tests.vmserver.pki import Authority
from txgrpc import Call
from vmserver.identity.current import CurrentIdentity
from vmserver.identity.keys import key_of
from vmserver.machine.reports import Report, Reports
from vmserver.rpc.attestation import AttestationCalls

NONCE = bytes(range(32))


class _Kernel:
    """The directory; each that is made there has files. :ivar written: what reports were to contain."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.written: list[bytes] = []
        self.files: dict[str, bytes] = {"provider": b"sev_guest\n", "outblob": b"report", "auxblob": b"chain"}

    def make(self, path: Path) -> None:
        path.mkdir()
        for name, content in self.files.items():
            (path / name).write_bytes(content)

    def remove(self, path: Path) -> None:
        self.written.append((path / "inblob").read_bytes())
        shutil.rmtree(path)


class ReportsTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.kernel = _Kernel(run_directory(self))
        self.reports = Reports(self.kernel.directory, self.kernel.make, self.kernel.remove)

    def test_a_report_of_what_it_is_to_contain(self) -> None:
        self.assertEqual(self.reports._thd_of(b"b" * 64), Report("sev_guest", b"report", b"chain"))
        self.assertEqual(self.kernel.written, [b"b" * 64])
        self.assertEqual(os.listdir(self.kernel.directory), [])

    def test_a_kernel_that_has_nothing_besides(self) -> None:
        del self.kernel.files["auxblob"]
        self.assertEqual(self.reports._thd_of(b"b" * 64).auxiliary, b"")

    def test_a_machine_without_reports_is_told_what_it_takes(self) -> None:
        error = self.assertRaises(FailedPrecondition, Reports(Path("/nonexistent"))._thd_of, b"b" * 64)
        self.assertIn("takes a confidential VM, and Linux 6.7 or newer", str(error))

    def test_a_report_that_fails_leaves_nothing(self) -> None:
        for name in ("outblob", "provider", "auxblob"):
            before = self.kernel.files[name]
            self.kernel.files[name] = bytes(MOST_REPORT + 1)
            error = self.assertRaises(Unavailable, self.reports._thd_of, b"b" * 64)
            self.assertIn(os.strerror(errno.EFBIG), str(error))
            self.assertEqual(os.listdir(self.kernel.directory), [])
            self.kernel.files[name] = before


class AttestTests(SynchronousTestCase):
    """The call."""

    def setUp(self) -> None:
        self.kernel = _Kernel(run_directory(self))
        identity = Authority().identity(SANDBOX)
        self.key = key_of(identity.certificate_pem)
        self.current = cast(CurrentIdentity, type("Current", (), {"key": self.key}))
        self.calls = self.made(Reports(self.kernel.directory, self.kernel.make, self.kernel.remove))

    def made(self, reports: Reports | None) -> AttestationCalls:
        return AttestationCalls(InlineThreads().reactor, self.current, reports)

    def ask(self, calls: AttestationCalls, nonce: bytes) -> Any:
        return start(calls.Attest(messages.AttestRequest(nonce=nonce), cast(Call, None)))

    def test_the_report_is_bound_to_the_nonce_and_to_the_agents_own_key(self) -> None:
        answer = self.successResultOf(self.ask(self.calls, NONCE))
        self.assertEqual(
            (answer.provider, answer.report, answer.auxiliary), ("sev_guest", b"report", b"chain")
        )
        self.assertEqual(self.kernel.written, [binding(NONCE, self.key)])
        self.assertNotIn(binding(NONCE, "0" * 64), self.kernel.written)
        self.assertNotIn(binding(NONCE[::-1], self.key), self.kernel.written)

    def test_a_nonce_that_is_none(self) -> None:
        for nonce in (b"", NONCE[:-1], bytes(65)):
            self.failureResultOf(self.ask(self.calls, nonce), InvalidArgument)
        self.assertEqual(self.kernel.written, [])

    def test_a_machine_of_several_pods_has_none(self) -> None:
        self.failureResultOf(self.ask(self.made(None), NONCE), Unimplemented)
