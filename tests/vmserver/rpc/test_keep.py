# SPDX-License-Identifier: Apache-2.0
"""Hold, Release and Adopt: what a request may say, and who refuses them."""

from __future__ import annotations

from typing import Any, cast

from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.concurrency import start
from infranetes_common.errors import InvalidArgument, Unimplemented
from infranetes_common.wire import cri
from infranetes_common.wire import vmserver as messages
from txgrpc import Call
from vmserver.containers.hooks import MAX_SECONDS as MAX_HOOK_SECONDS
from vmserver.containers.hooks import Hook
from vmserver.keeping.holding import Adoption, Holding, Wanted
from vmserver.rpc.keep import MAX_CONTAINERS, MAX_SECONDS, MAX_VOLUMES, KeepCalls

CALL = cast(Call, None)


class Recorder:
    """Record the calls."""

    def __init__(self) -> None:
        self.told: list[object] = []

    async def hold(self, wanted: Wanted) -> list[str]:
        self.told.append(wanted)
        return ["c1"]

    async def release(self) -> None:
        self.told.append("release")

    async def adopt(
        self, adoptions: list[Adoption], volumes: dict[str, str], sandbox: cri.PodSandboxConfig
    ) -> list[messages.ContainerState]:
        self.told.append((adoptions, volumes, sandbox))
        return [messages.ContainerState(id=each.new_id) for each in adoptions]


class KeepCallTests(SynchronousTestCase):
    """On a machine that is a pod's alone, and on one that is not."""

    def setUp(self) -> None:
        self.holding = Recorder()
        self.calls = KeepCalls(cast(Holding, self.holding))

    def hold(self, hooks: dict[str, messages.Hook] | None = None, **fields: Any) -> messages.HoldRequest:
        request = messages.HoldRequest(**{"seconds": 5.0, **fields})
        for id, hook in (hooks or {}).items():
            request.hooks[id].CopyFrom(hook)
        return request

    def test_what_is_asked_is_handed_on(self) -> None:
        hooks = {
            "c1": messages.Hook(command=["sync", "now"], seconds=2.0),
            "c2": messages.Hook(signal=12, seconds=0.5),
        }
        request = self.hold(hooks, volumes=["v1", "v1"], keep_secrets=True)
        answer = self.successResultOf(start(self.calls.Hold(request, CALL)))
        self.assertEqual(answer.containers, ["c1"])
        told = {"c1": Hook(("sync", "now"), 0, 2.0), "c2": Hook((), 12, 0.5)}
        self.assertEqual(self.holding.told, [Wanted(told, {"v1"}, True, 5.0)])
        self.successResultOf(start(self.calls.Release(messages.ReleaseRequest(), CALL)))
        self.assertEqual(self.holding.told[1:], ["release"])

    def test_what_is_adopted_is_handed_on(self) -> None:
        config = cri.ContainerConfig(command=["a"])
        sandbox = cri.PodSandboxConfig(hostname="clone")
        hook = messages.Hook(command=["reseed"], seconds=1.0)
        request = messages.AdoptRequest(
            containers=[
                messages.Adoption(old_id="o1", new_id="n1", config=config, hook=hook),
                messages.Adoption(old_id="o2", new_id="n2", config=config),
            ],
            volumes=[messages.AdoptedVolume(old_id="v1", new_id="w1")],
            sandbox_config=sandbox,
        )
        answer = self.successResultOf(start(self.calls.Adopt(request, CALL)))
        self.assertEqual([each.id for each in answer.containers], ["n1", "n2"])
        adopted = [
            Adoption("o1", "n1", config, Hook(("reseed",), 0, 1.0)),
            Adoption("o2", "n2", config, None),
        ]
        self.assertEqual(self.holding.told, [(adopted, {"v1": "w1"}, sandbox)])

    def test_what_can_never_be_is_refused(self) -> None:
        well: dict[str, Any] = {"seconds": 1.0}
        for request in (
            *(self.hold(seconds=each) for each in (0.0, -1.0, float("nan"), float("inf"), MAX_SECONDS + 1)),
            self.hold(volumes=["../v"]),
            self.hold(volumes=[f"v{n}" for n in range(MAX_VOLUMES + 1)]),
            self.hold({f"c{n}": messages.Hook(signal=1, **well) for n in range(MAX_CONTAINERS + 1)}),
            self.hold({"../c": messages.Hook(signal=1, **well)}),
            self.hold({"c": messages.Hook(**well)}),
            self.hold({"c": messages.Hook(command=["a"], signal=1, **well)}),
            self.hold({"c": messages.Hook(command=["a\0"], **well)}),
            self.hold({"c": messages.Hook(command=[""], **well)}),
            self.hold({"c": messages.Hook(signal=65, **well)}),
            *(
                self.hold({"c": messages.Hook(signal=1, seconds=each)})
                for each in (0.0, float("nan"), MAX_HOOK_SECONDS + 1)
            ),
        ):
            self.failureResultOf(start(self.calls.Hold(request, CALL)), InvalidArgument)
        env = cri.ContainerConfig(envs=[cri.KeyValue(key="A=B")])
        for adopting in (
            messages.AdoptRequest(containers=[messages.Adoption(old_id="o", new_id="N")]),
            messages.AdoptRequest(containers=[messages.Adoption(old_id="", new_id="n")]),
            messages.AdoptRequest(containers=[messages.Adoption(old_id="o", new_id="n", config=env)]),
            messages.AdoptRequest(
                containers=[messages.Adoption(old_id="o", new_id="n", hook=messages.Hook())]
            ),
            messages.AdoptRequest(volumes=[messages.AdoptedVolume(old_id="v", new_id="../w")]),
            messages.AdoptRequest(containers=[messages.Adoption()] * (MAX_CONTAINERS + 1)),
            messages.AdoptRequest(volumes=[messages.AdoptedVolume()] * (MAX_VOLUMES + 1)),
        ):
            self.failureResultOf(start(self.calls.Adopt(adopting, CALL)), InvalidArgument)
        self.assertEqual(self.holding.told, [])

    def test_a_machine_of_several_pods_is_not_kept(self) -> None:
        calls = KeepCalls(None)
        for call in (
            calls.Hold(self.hold(), CALL),
            calls.Release(messages.ReleaseRequest(), CALL),
            calls.Adopt(messages.AdoptRequest(), CALL),
        ):
            words = str(self.failureResultOf(start(call), Unimplemented).value)
            self.assertIn("shares this machine", words)
