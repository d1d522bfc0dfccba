# SPDX-License-Identifier: Apache-2.0
"""What a provider is asked for is all that the request and the record say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from infranetes.machines.context import VmFacts
from infranetes.machines.spec import LAUNCH_CERTIFICATE_SECONDS, first_certificate, instance_spec
from infranetes.providers.interface import Attachment, InstanceSpec, Size, VmRequest
from infranetes_common.identity import Identity
from tests.infranetes.pods.fakes import FakeNode

ID, TOKEN = "1d" * 16, "70" * 16


class SpecTests(SynchronousTestCase):
    def world(self, **times: Any) -> FakeNode:
        world = FakeNode(**times)
        self.addCleanup(world.kill)
        return world

    def test_nothing_is_left_out(self) -> None:
        world = self.world()
        request = VmRequest(
            Size(1000, 1 << 30),
            hostname="web-0",
            annotations={"infranetes.io/spot": "true"},
            image="image",
            cgroup_parent="/kubepods/pod1",
            attachment=Attachment(Path("/run/netns/x"), "eth1"),
            zone="a",
            granted=frozenset({"infranetes.io/spot"}),
        )
        signed = first_certificate(world.node_provider, ID)
        spec = instance_spec(world.node_provider, VmFacts(ID, TOKEN), request, signed)
        self.assertEqual(
            spec,
            InstanceSpec(
                token=TOKEN,
                sandbox_id=ID,
                cluster="c",
                node="n",
                identity=Identity(
                    sandbox_id=ID,
                    certificate_pem=signed.certificate_pem,
                    key_pem=signed.key_pem,
                    ca_pem="CA",
                    hostname="web-0",
                    machine_id=ID,
                    entropy=spec.identity.entropy,
                    now_nanos=world.now(),
                ),
                request=request,
            ),
        )
        again = instance_spec(world.node_provider, VmFacts(ID, TOKEN), request, signed)
        self.assertNotEqual(again.identity.entropy, spec.identity.entropy)
        self.assertEqual(len(bytes.fromhex(spec.identity.entropy)), 64)

    def test_the_first_certificate_is_valid_for_little_more_than_a_launch_and_never_for_longer_than_others(
        self,
    ) -> None:
        for certificate, lifetime in (
            (86400.0, 60.0 + LAUNCH_CERTIFICATE_SECONDS),
            (1000.0, 1000.0),
        ):
            world = self.world(launch=60.0, certificate=certificate)
            signed = first_certificate(world.node_provider, ID)
            self.assertEqual(signed.until - world.clock.seconds(), lifetime)
