# SPDX-License-Identifier: Apache-2.0
"""What pods were refused lately, by what the kernel has counted."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from infranetes.providers.interface import RefusedPackets, Share
from infranetes.providers.qemu.network.refusals import since, used_up


class SinceTests(SynchronousTestCase):
    def test_what_came_since_is_told_apart_from_what_was_there(self) -> None:
        before = {"10.0.0.5": {Share.CONNECTIONS: 7, Share.FRAGMENTS: 9}, "10.0.0.6": {Share.CONNECTIONS: 90}}
        now = {"10.0.0.5": {Share.CONNECTIONS: 7, Share.FRAGMENTS: 10, Share.NEIGHBOURS: 4},
               "10.0.0.6": {Share.CONNECTIONS: 3}}  # fmt: skip
        found = since(before, now)
        self.assertEqual(
            found["10.0.0.5"],
            {
                Share.CONNECTIONS: RefusedPackets(7, 0),
                Share.FRAGMENTS: RefusedPackets(10, 1),
                Share.NEIGHBOURS: RefusedPackets(4, 4),
            },
        )
        self.assertEqual(
            found["10.0.0.6"], {Share.CONNECTIONS: RefusedPackets(3, 3)}, "the next pod with the address"
        )
        self.assertEqual(used_up(found["10.0.0.5"]), ["fragments (1 packets)", "neighbours (4 packets)"])
