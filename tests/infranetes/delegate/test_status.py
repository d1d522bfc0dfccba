# SPDX-License-Identifier: Apache-2.0
"""Status is the delegate's, with ours added."""

from __future__ import annotations

import json

from infranetes.delegate.channel import IMAGES
from infranetes_common.wire import cri
from tests.infranetes.delegate.case import RUNTIME, RouterCase
from tests.support.delegate import UNKNOWN
from tests.txgrpc.support import status_of
from txgrpc import Code


def ours(ready: bool) -> cri.StatusResponse:
    """Return our own Status."""
    words = "" if ready else "the template is being made"
    return cri.StatusResponse(
        status=cri.RuntimeStatus(
            conditions=[
                cri.RuntimeCondition(type=kind, status=ready, reason="", message=words)
                for kind in ("RuntimeReady", "NetworkReady", "Other")
            ]
        ),
        runtime_handlers=[cri.RuntimeHandler(name=name) for name in ("", "infranetes", "machines")],
        features=cri.RuntimeFeatures(supplemental_groups_policy=True),
        info={"node": '{"containers": 3}', "text": "no JSON"},
    )


class StatusTests(RouterCase):
    """The Status that kubelet gets."""

    async def status(self, verbose: bool = True) -> cri.StatusResponse:
        request = cri.StatusRequest(verbose=verbose).SerializeToString()
        answer = await self.raw.call(f"{RUNTIME}/Status", request, timeout=60)
        self.assertIn(UNKNOWN, answer)
        return cri.StatusResponse.FromString(answer)

    async def test_a_provider_that_is_not_ready_does_not_make_the_node_so(self) -> None:
        self.ours.answers["Status"] = ours(ready=False)
        status = await self.status()
        self.assertEqual(
            [(each.type, each.status) for each in status.status.conditions],
            [
                ("RuntimeReady", True),
                ("NetworkReady", True),
                ("Other", False),
                ("InfranetesProvider", False),
                ("InfranetesDelegate", True),
            ],
        )
        self.assertEqual(status.status.conditions[3].message, "the template is being made")

    async def test_handlers_are_both_s_and_features_the_delegates(self) -> None:
        self.ours.answers["Status"] = ours(ready=True)
        status = await self.status()
        self.assertEqual(
            [each.name for each in status.runtime_handlers], ["", "runc", "infranetes", "machines"]
        )
        self.assertFalse(status.HasField("features"))

    async def test_information_is_under_a_name_of_ours(self) -> None:
        self.ours.answers["Status"] = ours(ready=True)
        status = await self.status()
        self.assertEqual(set(status.info), {"config", "infranetes"})
        info = json.loads(status.info["infranetes"])
        self.assertEqual((info["node"], info["text"]), ({"containers": 3}, "no JSON"))
        self.assertEqual(info["delegate"]["state"], "up")

    async def test_a_handler_that_both_have_is_refused(self) -> None:
        """The delegate's handler would be hidden by ours. Once it is gone, our pods can be run again."""
        self.ours.answers["Status"] = ours(ready=True)
        self.theirs.handlers.append("infranetes")
        status = await self.status()
        condition = status.status.conditions[-1]
        self.assertEqual((condition.type, condition.status), ("InfranetesDelegate", False))
        self.assertIn("the runtime handler 'infranetes' is the delegate's, too", condition.message)
        run = cri.RunPodSandboxRequest(runtime_handler="infranetes")
        self.assertEqual(
            (await status_of(self.stub.RunPodSandbox(run, timeout=60))).code, Code.FAILED_PRECONDITION
        )
        await self.stub.RunPodSandbox(cri.RunPodSandboxRequest(runtime_handler="machines"), timeout=60)
        self.theirs.handlers.remove("infranetes")
        await self.status()
        await self.stub.RunPodSandbox(run, timeout=60)

    async def test_what_is_refused_is_told_with_the_handlers_that_it_concerns(self) -> None:
        self.ours.answers["Status"] = ours(ready=True)
        self.delegate.refuse(IMAGES, "containerd deletes layers")
        self.delegate.refuse("what nobody needs", "never mind")
        condition = (await self.status()).status.conditions[-1]
        self.assertEqual((condition.type, condition.reason), ("InfranetesDelegate", "DelegateRefused"))
        expected = "containerd deletes layers (pods of these handlers are refused: infranetes)"
        self.assertEqual(condition.message, expected)

    async def test_a_delegate_that_is_no_runtime(self) -> None:
        self.theirs.answers["Status"] = lambda _: b"\xff"
        error = await status_of(self.stub.Status(cri.StatusRequest(), timeout=60))
        self.assertEqual(
            (error.code, error.message), (Code.UNAVAILABLE, "the delegate's Status can't be read")
        )


class OldStatusTests(RouterCase):
    """containerd 1.6 lists no handlers."""

    old = True

    async def test_pods_without_a_RuntimeClass_have_a_handler(self) -> None:
        self.ours.answers["Status"] = ours(ready=True)
        status = await self.stub.Status(cri.StatusRequest(), timeout=60)
        self.assertEqual([each.name for each in status.runtime_handlers], ["", "infranetes", "machines"])

    async def test_what_it_does_not_have_nobody_has(self) -> None:
        for call in (
            self.stub.RuntimeConfig(cri.RuntimeConfigRequest(), timeout=60),
            self.stub.ListPodSandboxMetrics(cri.ListPodSandboxMetricsRequest(), timeout=60),
            self.stub.ListMetricDescriptors(cri.ListMetricDescriptorsRequest(), timeout=60),
        ):
            self.assertEqual((await status_of(call)).code, Code.UNIMPLEMENTED)
