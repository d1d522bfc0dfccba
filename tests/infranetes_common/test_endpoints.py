# SPDX-License-Identifier: Apache-2.0
"""A connection that is refused is told at once."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet.endpoints import HostnameEndpoint
from twisted.internet.error import ConnectionRefusedError
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.testing import MemoryReactorClock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.endpoints import tcp_endpoint


class EndpointTests(SynchronousTestCase):
    """Endpoints of a reactor in memory."""

    def test_of_an_address_without_time_passing(self) -> None:
        for host in ("10.89.0.2", "2001:db8::2"):
            with self.subTest(host=host):
                reactor = MemoryReactorClock()
                endpoint: Any = tcp_endpoint(reactor, host, 2475, 7.0)
                attempt = endpoint.connect(Factory.forProtocol(Protocol))
                [client] = reactor.tcpClients
                asked, port, factory, timeout = cast("tuple[str, int, Any, float]", client[:4])
                self.assertEqual((asked, port, timeout), (host, 2475, 7.0))
                factory.clientConnectionFailed(None, Failure(ConnectionRefusedError()))
                self.failureResultOf(attempt, ConnectionRefusedError)

    def test_names_are_looked_up(self) -> None:
        endpoint = tcp_endpoint(MemoryReactorClock(), "vm.example.org", 2475, 7.0)
        self.assertIsInstance(endpoint, HostnameEndpoint)
