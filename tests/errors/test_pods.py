# SPDX-License-Identifier: Apache-2.0
"""Mistakes by which pods fail: what kubelet and crictl are answered, and what infranetes-ctl shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infranetes.guest import image
from infranetes.providers.annotations import read
from infranetes_common.concurrency import start
from infranetes_common.errors import InfranetesError, InvalidArgument
from tests.errors.mistakes import CRICTL, DESCRIBE, EVENTS, PODS, Mistake, MistakeCase
from tests.infranetes.pods.fakes import FakeNode, pod


class PodTests(MistakeCase):
    def setUp(self) -> None:
        self.world = FakeNode()
        self.world.provider_ready()
        self.addCleanup(self.world.kill)

    def answered(self, handler: str = "", **fields: Any) -> str:
        """Return what RunPodSandbox answers, which crictl prints and kubelet makes an event of."""
        failure = self.failureResultOf(start(self.world.sandboxes.run(pod("web", **fields), handler)))
        self.assertIsInstance(failure.value, InfranetesError)
        return str(failure.value)

    def refused(self, annotations: dict[str, str]) -> str:
        """Return what RunPodSandbox answers of a pod's annotations."""
        with self.assertRaises(InvalidArgument) as caught:
            read(annotations)
        return str(caught.exception)

    def test_24_an_annotation_is_misspelt(self) -> None:
        said = {CRICTL: self.refused({"infranetes.io/instance-typ": "m5.large"})}
        self.told(Mistake("annotation infranetes.io/instance-typ", "did you mean .*instance-type"), said)

    def test_25_an_annotation_has_a_value_that_is_none(self) -> None:
        said = {CRICTL: self.refused({"infranetes.io/memory": "8 gigs"})}
        self.told(Mistake("annotation infranetes.io/memory: '8 gigs'", "expected a size .*such as 8Gi"), said)

    def test_26_an_old_and_a_new_name_that_differ(self) -> None:
        differ = {"infranetes.io/image": "ami-1", "infranetes.aws.image": "ami-2"}
        said = {CRICTL: self.refused(differ)}
        self.told(Mistake("infranetes.io/image and infranetes.aws.image differ", "give one"), said)

    def test_27_an_annotation_that_the_provider_does_not_serve(self) -> None:
        with self.assertRaises(InvalidArgument) as caught:
            read({"infranetes.io/spot": "true"}).refuse_others("qemu", ())
        said = {CRICTL: str(caught.exception)}
        self.told(Mistake("infranetes.io/spot can't be served: qemu", "leave it out, or have the pod"), said)

    def test_28_the_guest_image_is_not_built(self) -> None:
        directory = Path("/nonexistent")
        with self.assertRaises(InfranetesError) as caught:
            image.current(directory)
        self.world.provider.launch_error = caught.exception
        said = {CRICTL: self.answered()}
        said[PODS] = self.asked(self.world, "get", "pods")
        said[DESCRIBE] = self.asked(self.world, "describe", "pod", "web")
        said[EVENTS] = self.asked(self.world, "events", "--failed")
        mistake = Mistake("there is no guest image in /nonexistent", "infranetes-guest build|make image")
        self.told(mistake, said, cause_alone=(PODS,))
        self.assertIn("`infranetes-ctl describe POD` tells more", said[PODS])


class ProviderTests(MistakeCase):
    def test_29_a_provider_that_is_not_ready(self) -> None:
        world = FakeNode()
        self.addCleanup(world.kill)
        trouble = "no credentials: set AWS_PROFILE, or give the node an instance profile"
        world.node.providers.own.trouble = trouble
        failure = self.failureResultOf(start(world.sandboxes.run(pod("web"), "")))
        said = {CRICTL: str(failure.value), PODS: self.asked(world, "get", "pods")}
        self.told(Mistake("no credentials", "set AWS_PROFILE"), said)
