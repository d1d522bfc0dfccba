# SPDX-License-Identifier: Apache-2.0
"""What systemd is told of the daemon's start and of its reloads."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from infranetes.daemon.service_manager import MAX_STATUS, ServiceManager

WAITING = "waiting for provider qemu: there is no guest image"


class StatusTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.sent: list[str] = []
        self.manager = ServiceManager(self.sent.append)

    def reload(self, refusal: str = "") -> str:
        self.manager.reloading()
        self.manager.reloaded(refusal)
        return self.sent[-1]

    def test_a_reload_leaves_what_the_daemon_waits_for(self) -> None:
        self.manager.ready(WAITING)
        self.assertEqual(self.reload(), f"READY=1\nSTATUS={WAITING}")
        self.assertTrue(self.sent[1].startswith("RELOADING=1\nMONOTONIC_USEC="))

    def test_a_refusal_is_added_and_stays_until_a_reload_succeeds(self) -> None:
        self.manager.ready(WAITING)
        refused = "; the configuration was not reloaded: a: wrong b: wrong"
        self.assertEqual(self.reload("a: wrong\nb: wrong"), f"READY=1\nSTATUS={WAITING}{refused}")
        self.manager.ready("serving")
        self.assertEqual(self.sent[-1], f"READY=1\nSTATUS=serving{refused}")
        self.assertEqual(self.reload(), "READY=1\nSTATUS=serving")

    def test_one_that_still_starts_reloads_nothing_to_systemd_but_tells_a_refusal(self) -> None:
        self.manager.progress("making a template")
        self.assertEqual(
            self.reload("a: wrong"), "STATUS=making a template; the configuration was not reloaded: a: wrong"
        )
        self.assertFalse(any("READY" in each or "RELOADING" in each for each in self.sent))

    def test_a_provider_that_gets_on_meanwhile_does_not_end_the_reload(self) -> None:
        self.manager.ready(WAITING)
        self.manager.reloading()
        self.manager.ready("serving")
        self.assertEqual(self.sent[-1], "STATUS=serving")
        self.manager.reloaded()
        self.assertEqual(self.sent[-1], "READY=1\nSTATUS=serving")

    def test_one_that_becomes_ready_during_a_reload_is_ready(self) -> None:
        self.manager.reloading()
        self.manager.ready("serving")
        self.assertEqual(self.sent, ["READY=1\nSTATUS=serving"])

    def test_no_secret_is_told_to_those_who_may_read_the_status(self) -> None:
        secret = "https://me:hunter22@proxy.example"
        self.manager.progress(f"waiting\nfor {secret}")
        self.manager.ready(f"{'x' * (MAX_STATUS - 20)} {secret} refused it")
        self.reload(f"no way to {secret}")
        self.assertNotIn("hunter", "".join(self.sent))
        self.assertIn("no way to https://(hidden)@proxy.example", self.sent[-1])

    def test_a_long_status_leaves_room_for_a_refusal(self) -> None:
        self.manager.ready("x" * 9999)
        said = self.reload("y" * 9999)
        self.assertIn("x; the configuration was not reloaded: yy", said)
        self.assertLess(len(said), 2 * MAX_STATUS + 100)
