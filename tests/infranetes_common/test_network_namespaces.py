# SPDX-License-Identifier: Apache-2.0
"""Work in network namespaces."""

from __future__ import annotations

import socket

from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.network_namespaces import thd_in_namespace
from tests.harness.needs import needs_netns
from tests.harness.tools import need
from tests.support.spaces import Space


def interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


@needs_netns
class NamespaceTests(SynchronousTestCase):
    def setUp(self) -> None:
        need("ip")
        self.space = Space("work")
        self.addCleanup(self.space.end)
        self.space.ip("link add inside type bridge")

    def test_the_work_is_done_there_and_nothing_else_is(self) -> None:
        here = interfaces()
        self.assertIn("inside", thd_in_namespace(self.space.name, interfaces))
        self.assertEqual(interfaces(), here)

    def test_what_the_work_raises_is_raised(self) -> None:
        def failing() -> None:
            raise ValueError("it fails")

        self.assertRaisesRegex(ValueError, "it fails", thd_in_namespace, self.space.name, failing)

    def test_nothing_is_done_where_there_is_no_such_namespace(self) -> None:
        done: list[str] = []
        with self.assertRaises(OSError):
            thd_in_namespace(f"{self.space.name}-none", lambda: done.append("here"))
        self.assertEqual(done, [])
