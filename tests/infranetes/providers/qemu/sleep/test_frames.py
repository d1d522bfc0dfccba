# SPDX-License-Identifier: Apache-2.0
"""What frames that are sent to a VM which sleeps ask for."""

from __future__ import annotations

import os

from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.qemu.sleep.frames import Call, Sleeping

MAC, OTHER = bytes.fromhex("0a580a000002"), bytes.fromhex("0a580a000001")
ALL = b"\xff" * 6
OURS, THEIRS, NOBODY = b"\x0a\x00\x00\x02", b"\x0a\x00\x00\x01", b"\x0a\x00\x00\x09"
SIXTH = bytes.fromhex("fd00" + "00" * 13 + "02")
SLEEPING = Sleeping.of("0a:58:0a:00:00:02", ["10.0.0.2", "fd00::2"])


def arp(target: bytes, to: bytes = ALL, operation: int = 1, sender: bytes = THEIRS) -> bytes:
    fixed = bytes.fromhex("000108000604") + operation.to_bytes(2, "big")
    return to + OTHER + b"\x08\x06" + fixed + OTHER + sender + bytes(6) + target


def ip(to: bytes, kind: bytes = b"\x08\x00") -> bytes:
    return to + OTHER + kind + bytes(40)


def solicitation(target: bytes) -> bytes:
    header = b"\x60" + bytes(5) + b"\x3a\xff" + bytes(32)
    return b"\x33\x33\xff\x00\x00\x02" + OTHER + b"\x86\xdd" + header + b"\x87" + bytes(7) + target


class FrameTests(SynchronousTestCase):
    def test_a_question_for_its_address_is_answered_to_whoever_asks(self) -> None:
        for to in (ALL, MAC):
            answer = SLEEPING.heard(arp(OURS, to) + bytes(18))  # padded, as Ethernet has it
            assert isinstance(answer, bytes)
            self.assertEqual(answer[:14], OTHER + MAC + b"\x08\x06")
            self.assertEqual(answer[14:], bytes.fromhex("0001080006040002") + MAC + OURS + OTHER + THEIRS)

    def test_questions_for_others_and_answers_are_not(self) -> None:
        for frame in (arp(NOBODY), arp(OURS, operation=2), arp(OURS, sender=OURS), arp(OURS)[:41]):
            self.assertIsNone(SLEEPING.heard(frame))

    def test_a_packet_to_it_calls_it(self) -> None:
        for kind in (b"\x08\x00", b"\x86\xdd"):
            self.assertIs(SLEEPING.heard(ip(MAC, kind)), Call.CALL)

    def test_what_is_for_all_or_for_others_calls_nobody(self) -> None:
        for to in (ALL, OTHER, b"\x01\x00\x5e\x00\x00\x01", b"\x33\x33\x00\x00\x00\x01"):
            for kind in (b"\x08\x00", b"\x86\xdd", b"\x88\xcc"):
                self.assertIsNone(SLEEPING.heard(ip(to, kind)))
        self.assertIsNone(SLEEPING.heard(ip(MAC, b"\x88\xcc")))

    def test_a_solicitation_for_its_address_calls_it(self) -> None:
        self.assertIs(SLEEPING.heard(solicitation(SIXTH)), Call.CALL)
        self.assertIsNone(SLEEPING.heard(solicitation(SIXTH[:-1] + b"\x03")))

    def test_another_packet_that_looks_like_one_calls_nobody(self) -> None:
        whole = solicitation(SIXTH)
        tcp = whole[:20] + b"\x06" + whole[21:]
        advertisement = whole[:54] + b"\x88" + whole[55:]
        for frame in (tcp, advertisement):
            self.assertIsNone(SLEEPING.heard(frame))

    def test_the_hardware_address_of_one_that_asks_is_answered_also_if_it_asks_from_another(self) -> None:
        frame = b"\xff" * 6 + b"\x02" * 6 + arp(OURS)[12:]
        answer = SLEEPING.heard(frame)
        assert isinstance(answer, bytes)
        self.assertEqual((answer[:6], answer[32:38]), (b"\x02" * 6, OTHER))

    def test_whatever_comes_is_no_error(self) -> None:
        for length in range(100):
            SLEEPING.heard(os.urandom(length))
            SLEEPING.heard((arp(OURS) + bytes(60))[:length])
            SLEEPING.heard(solicitation(SIXTH)[:length])
