# SPDX-License-Identifier: Apache-2.0
"""ConfigMaps and Secrets that a pod names in an annotation."""

from __future__ import annotations

import base64
from pathlib import Path

from twisted.internet.task import Clock
from twisted.trial.unittest import TestCase

from infranetes.kubernetes.api_server import ApiServer
from infranetes.kubernetes.config_objects import ANSWER_SECONDS, MAX_OBJECT, ApiServerObjects
from infranetes_common.concurrency import deferred, start
from infranetes_common.errors import (
    DeadlineExceeded,
    InfranetesError,
    NotFound,
    PermissionDenied,
    Unavailable,
)
from infranetes_common.reactors import installed
from tests.infranetes.kubernetes.api_server import SimulatedApiServer
from tests.support.waiting import until

reactor = installed()
MAP, SECRET = "/api/v1/namespaces/shop/configmaps/vm", "/api/v1/namespaces/shop/secrets/people"


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


class ConfigObjectTests(TestCase):
    def setUp(self) -> None:
        self.server = SimulatedApiServer(reactor)
        self.server.start()
        self.addCleanup(self.server.stop)
        self.clock = Clock()
        kubeconfig = self.server.kubeconfig(Path(self.mktemp()))
        self.objects = ApiServerObjects(self.clock, ApiServer(reactor, kubeconfig))

    async def failure(self, kind: type[InfranetesError]) -> str:
        return str(await self.assertFailure(start(self.objects.of("shop", "secret", "people")), kind))

    @deferred
    async def test_a_config_map_has_texts_and_bytes(self) -> None:
        self.server.single[MAP] = {
            "kind": "ConfigMap",
            "data": {"user-data": "ü\n"},
            "binaryData": {"zipped": encoded(b"\x1f\x8b\0")},
        }
        found = await self.objects.of("shop", "configmap", "vm")
        self.assertEqual(found, {"user-data": "ü\n".encode(), "zipped": b"\x1f\x8b\0"})

    @deferred
    async def test_a_secret_has_bytes(self) -> None:
        self.server.single[SECRET] = {"kind": "Secret", "data": {"authorized_keys": encoded(b"\0x")}}
        self.assertEqual(await self.objects.of("shop", "secret", "people"), {"authorized_keys": b"\0x"})
        self.server.single[SECRET] = {"kind": "Secret"}
        self.assertEqual(await self.objects.of("shop", "secret", "people"), {})

    @deferred
    async def test_names_stay_names(self) -> None:
        self.server.single[SECRET] = {"kind": "Secret"}
        asking = start(self.objects.of("shop/secrets/people?", "configmap", "../people"))
        await self.assertFailure(asking, NotFound)
        self.assertNotIn(SECRET, [asked["path"] for asked in self.server.asked])

    @deferred
    async def test_what_is_not_there_or_not_allowed_is_said_with_what_to_do(self) -> None:
        self.assertIn("no secret shop/people", await self.failure(NotFound))
        self.server.refused.add(SECRET)
        refused = await self.failure(PermissionDenied)
        self.assertIn("mount it in the pod", refused)
        self.assertIn("get secrets in namespace shop", refused)
        self.server.status = 500
        self.assertIn("answers 500", await self.failure(Unavailable))

    @deferred
    async def test_an_answer_that_is_none_shows_nothing_of_itself(self) -> None:
        for data in ({"a": "hunter2!"}, {"a": ["hunter2"]}, ["hunter2"], {"a": "hunter2" + "x" * MAX_OBJECT}):
            self.server.single[SECRET] = {"kind": "Secret", "data": data}
            self.assertNotIn("hunter2", await self.failure(Unavailable))

    @deferred
    async def test_an_answer_that_does_not_come_is_given_up(self) -> None:
        self.server.silent.add(SECRET)
        asking = start(self.objects.of("shop", "secret", "people"))
        await until(lambda: bool(self.server.asked), "it is asked")
        self.clock.advance(ANSWER_SECONDS)
        await self.assertFailure(asking, DeadlineExceeded)
