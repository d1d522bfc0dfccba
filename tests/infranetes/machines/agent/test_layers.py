# SPDX-License-Identifier: Apache-2.0
"""The agent client's calls about layers; answers about layers that it did not ask for are not believed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from infranetes.machines.agent.calls import CHUNK_BYTES
from infranetes_common.errors import (
    DataLoss,
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    OutOfRange,
    ResourceExhausted,
)
from infranetes_common.wire import vmserver
from tests.infranetes.machines.agent.test_client import HostileCase

A, B = (f"sha256:{name * 64}" for name in "ab")


class LayerTests(HostileCase):
    async def test_how_much_of_each_layer_is_there(self) -> None:
        async def some(agent: Any, request: Any) -> Any:
            states = [
                vmserver.LayerState(diff_id=A, mounted=True),
                vmserver.LayerState(diff_id=B, arrived=2**64 - 1, digest=A),
            ]
            return vmserver.ListLayersResponse(layers=states)

        self.agent.attacks = {"ListLayers": some}
        found = await self.client.layers([A, B])
        self.assertEqual([(one.mounted, one.arrived) for one in found], [(True, 0), (False, 2**63 - 1)])

    async def test_layers_that_were_not_asked_for(self) -> None:
        for attack in ("others", "digests", "broken"):
            self.attack("ListLayers", attack)
            await self.refused(InfranetesError, self.client.layers([A, B]))
        for attack in ("many", "huge"):
            self.attack("ListLayers", attack)
            await self.refused(ResourceExhausted, self.client.layers([A, B]))

    async def test_answers_that_are_too_large(self) -> None:
        for method, call in (
            ("MountLayers", lambda: self.client.mount_layers([vmserver.LayerDisk(diff_id=A, lun=1)])),
            ("PutLayer", lambda: self.put(b"x")),
            ("RemoveLayers", lambda: self.client.remove_layers([A])),
            ("AddImage", lambda: self.client.add_image(A, b"{}")),
        ):
            self.attack(method, "huge")
            await self.refused(ResourceExhausted, call())

    async def put(self, *pieces: bytes) -> None:
        async def data() -> AsyncIterator[bytes]:
            try:
                for piece in pieces:
                    yield piece
            finally:
                self.closed = True

        self.closed = False
        header = vmserver.PutLayerHeader(diff_id=A, size=sum(map(len, pieces)), digest=B)
        await self.client.put_layer(header, data())

    async def test_a_layer_goes_in_pieces_after_its_header(self) -> None:
        sent: list[Any] = []

        async def taking(agent: Any, requests: Any) -> Any:
            async for request in requests:
                sent.append(request)
            return vmserver.PutLayerResponse()

        self.agent.attacks = {"PutLayer": taking}
        await self.put(b"x" * (2 * CHUNK_BYTES + 1), b"", b"y")
        header, *pieces = sent
        self.assertEqual((header.header.diff_id, header.header.digest), (A, B))
        self.assertEqual([len(one.data) for one in pieces], [CHUNK_BYTES, CHUNK_BYTES, 1, 1])
        self.assertTrue(self.closed)

    async def test_an_agent_that_answers_before_all_is_sent(self) -> None:
        async def at_once(agent: Any, requests: Any) -> Any:
            return vmserver.PutLayerResponse()

        self.agent.attacks = {"PutLayer": at_once}
        await self.put(*[b"x" * CHUNK_BYTES] * 40)
        self.assertTrue(self.closed)

    async def test_failures_that_tell_what_to_do(self) -> None:
        for kind in (OutOfRange, DataLoss, ResourceExhausted, FailedPrecondition, InvalidArgument):

            async def failing(agent: Any, requests: Any, kind: type[Exception] = kind) -> Any:
                raise kind("words")

            self.agent.attacks = {"PutLayer": failing}
            self.assertEqual(await self.refused(kind, self.put(b"x" * CHUNK_BYTES)), "words")
            self.assertTrue(self.closed)
