# SPDX-License-Identifier: Apache-2.0
"""Pods that start from kept states, and their containers that go on from there."""

from __future__ import annotations

import stat
from typing import Any
from unittest import mock

import attrs
from twisted.internet.defer import Deferred
from zope.interface import noLongerProvides

from infranetes.pods.keeping import starts
from infranetes.pods.keeping.starts import UNWANTED_SECONDS
from infranetes.pods.keeping.states import Stage
from infranetes.pods.node.handler_config import MACHINE
from infranetes.pods.node.handlers import AnnotationRule
from infranetes.providers.keeping import IStartsKeptVms
from infranetes_common.concurrency import start
from infranetes_common.errors import FailedPrecondition, InvalidArgument, Unavailable
from infranetes_common.wire import cri
from tests.infranetes.pods.fakes import box, pod
from tests.infranetes.pods.keeping.kept_case import CloneAgent, KeptCase

FROM = {"infranetes.io/start-from": "warm"}
OR_NOT = {**FROM, "infranetes.io/start-from-mismatch": "refuse"}
DATA = [cri.Mount(container_path="/data", host_path="/secret")]


class StartCase(KeptCase):
    """The pod `web`, whose container has a volume, is kept as `warm`. The tests run others."""

    def setUp(self) -> None:
        super().setUp()
        self.data = self.run_container(self.pod_id, name="data", mounts=DATA)
        self.state = self.kept()

    def asked(self, uid: str = "u2", **fields: Any) -> Deferred[str]:
        config = pod(**{"name": "clone", "uid": uid, "annotations": FROM, **fields})
        return start(self.world.sandboxes.run(config, ""))

    def started(self, uid: str = "u2", **fields: Any) -> str:
        return self.successResultOf(self.asked(uid, **fields))

    def create(self, sandbox: str, **fields: Any) -> Deferred[str]:
        return start(self.world.containers.create(sandbox, box(**fields)))

    def created(self, sandbox: str, **fields: Any) -> str:
        return self.successResultOf(self.create(sandbox, **fields))

    def steps(self, sandbox: str) -> list[str]:
        timeline = self.world.node.inventory.sandboxes[sandbox].timeline
        return [f"{each.what}: {each.detail}" for each in timeline.steps]

    def assert_cold(self, sandbox: str, words: str) -> None:
        self.assertIsNone(self.world.provider.specs[-1].kept)
        self.assertIsNone(self.world.clones.get(sandbox))
        [step] = [each for each in self.steps(sandbox) if each.startswith("the pod starts cold")]
        self.assertIn(words, step)

    def made_cold(self, agent: CloneAgent) -> list[str]:
        return [id for call, id in agent.calls if call == "create"]


class PodTests(StartCase):
    def test_its_vm_starts_from_the_state(self) -> None:
        sandbox = self.started()
        self.assertEqual(self.world.provider.specs[-1].kept, self.world.states.files(self.state.id))
        self.assertIn(
            "the pod starts from a kept state: default/warm, of pod default/web", self.steps(sandbox)
        )
        self.assertEqual(self.world.states.used_at(self.state) > self.state.kept_at, True)

    def test_other_pods_do_not(self) -> None:
        self.started(annotations={})
        self.assertIsNone(self.world.provider.specs[-1].kept)

    def test_the_pool_is_not_used(self) -> None:
        claimed: list[object] = []

        async def claim(*args: object) -> bool:
            claimed.append(args)
            return False

        self.patch(self.world.node.pools.own, "claim", claim)
        self.started()
        self.assertEqual(claimed, [])
        self.started("u3", annotations={"infranetes.io/start-from": "other"})
        self.assertEqual(len(claimed), 1)

    def test_what_does_not_fit_starts_cold_and_says_why(self) -> None:
        labels = {"pod-template-hash": "abc"}
        sysctls = cri.LinuxPodSandboxConfig(sysctls={"net.core.somaxconn": "9"})
        others: list[tuple[dict[str, Any], str]] = [
            ({"annotations": {"infranetes.io/start-from": "other"}}, "is not on this node"),
            ({"annotations": {**FROM, "infranetes.io/containers": "docker"}}, "another container provider"),
            ({"annotations": {**FROM, "infranetes.io/memory": "1Gi"}}, "another size"),
            ({"linux": sysctls}, "another sysctls"),
        ]
        for number, (fields, words) in enumerate(others):
            self.assert_cold(self.started(f"u{number + 5}", **fields), words)
        self.started("u20", labels=labels)  # what was kept is of no template
        self.assertIsNotNone(self.world.provider.specs[-1].kept)

    def test_a_state_of_another_template_is_not_used(self) -> None:
        labels = {"pod-template-hash": "one"}
        self.pod_id = self.run_pod(name="one", uid="u3", labels=labels)
        self.run_container(self.pod_id)
        self.successResultOf(start(self.world.states.remove(self.state.id)))
        state = self.kept()
        self.assert_cold(self.started("u4", labels={"pod-template-hash": "two"}), "another template")
        self.started("u5", labels=labels)
        self.assertEqual(self.world.provider.specs[-1].kept, self.world.states.files(state.id))

    def test_a_pod_without_a_template_starts_from_a_state_of_any(self) -> None:
        self.pod_id = self.run_pod(name="one", uid="u3", labels={"pod-template-hash": "one"})
        self.run_container(self.pod_id)
        state = self.kept("other")
        self.started("u4", annotations={"infranetes.io/start-from": "other"})
        self.assertEqual(self.world.provider.specs[-1].kept, self.world.states.files(state.id))

    def test_states_that_are_not_ready_or_of_other_providers_are_not_used(self) -> None:
        for number, changed in enumerate(({"stage": Stage.PREPARING}, {"provider": "aws"})):
            self.world.states.note(attrs.evolve(self.state, **changed))  # type: ignore[arg-type]
            self.assert_cold(self.started(f"u{number + 5}"), "is not on this node")

    def test_a_provider_that_starts_none_from_any_starts_cold(self) -> None:
        noLongerProvides(self.world.provider, IStartsKeptVms)
        self.assert_cold(self.started(), "don't start from kept states")
        self.failureResultOf(self.asked("u4", annotations=OR_NOT), FailedPrecondition)

    def test_a_machine_images_pod_is_refused(self) -> None:
        handler = attrs.evolve(self.world.node.handlers.by_name[""], kind=MACHINE)
        with self.assertRaises(InvalidArgument):
            self.world.starts.check(handler, pod(annotations=FROM))
        self.world.starts.check(handler, pod())

    def test_one_that_can_not_start_is_refused_before_it_is_recorded(self) -> None:
        config = pod(annotations={**OR_NOT, "infranetes.io/start-from": "other"})
        with self.assertRaises(FailedPrecondition):
            self.world.starts.check(self.world.node.handlers.by_name[""], config)

    def test_what_the_provider_refuses_starts_cold(self) -> None:
        self.keeping.check_error = FailedPrecondition("it is of QEMU 7.2, and this is 8.0")
        self.assert_cold(self.started(), "it is of QEMU 7.2")

    def test_one_that_may_not_start_cold_is_refused(self) -> None:
        self.keeping.check_error = FailedPrecondition("it is of QEMU 7.2, and this is 8.0")
        count = len(self.world.provider.specs)
        for _ in range(2):
            self.failureResultOf(self.asked(annotations=OR_NOT), FailedPrecondition)
        self.keeping.check_error = None
        self.successResultOf(start(self.world.states.remove(self.state.id)))
        for _ in range(2):
            self.failureResultOf(self.asked(annotations=OR_NOT), FailedPrecondition)
        self.assertEqual(len(self.world.provider.specs), count)
        self.assertEqual(self.world.clones.ids(), [])

    def test_states_of_other_namespaces_are_the_handlers_to_give(self) -> None:
        far = {"infranetes.io/start-from": "default/warm"}
        failure = self.failureResultOf(self.asked(annotations=far), InvalidArgument)
        self.assertIn("its own namespace", str(failure.value))
        config = pod(name="far", uid="u9", annotations=FROM)
        config.metadata.namespace = "prod"
        self.successResultOf(start(self.world.sandboxes.run(config, "")))
        self.assertIsNone(self.world.provider.specs[-1].kept)
        own = self.world.node.handlers.by_name[""]
        rule = AnnotationRule("", far)
        self.world.node.handlers.by_name[""] = attrs.evolve(own, annotations=rule)
        config = pod(name="far", uid="u10")
        config.metadata.namespace = "prod"
        self.successResultOf(start(self.world.sandboxes.run(config, "")))
        self.assertIsNotNone(self.world.provider.specs[-1].kept)

    def test_malformed_annotations_are_refused(self) -> None:
        for name, value in (
            ("start-from", "a/b/c"),
            ("start-from", "Warm"),
            ("start-from", ""),
            ("start-from-mismatch", "x"),
        ):
            annotations = {**FROM, f"infranetes.io/{name}": value}
            self.failureResultOf(self.asked(annotations=annotations), InvalidArgument)

    def test_a_launch_that_fails_leaves_no_record(self) -> None:
        self.world.provider.launch_error = FailedPrecondition("the state was removed")
        self.failureResultOf(self.asked(), FailedPrecondition)
        self.assertEqual(self.world.clones.ids(), [])
        self.world.provider.launch_error = None
        self.assertIsNotNone(self.world.clones.get(self.started()))

    def test_the_next_daemon_goes_on_with_its_launch(self) -> None:
        self.world.provider.launching = Deferred()
        self.asked().addErrback(lambda _: None)
        kept = self.world.provider.specs[-1].kept
        self.world.provider.launching = None
        self.keeping.check_error = FailedPrecondition("another one would not start from it any more")
        self.world.restart()
        self.assertEqual(self.world.provider.specs[-1].kept, kept)
        self.assertEqual(len(self.world.clones.ids()), 1)

    def test_its_record_goes_with_its_vm(self) -> None:
        sandbox = self.started()
        self.world.restart()
        self.assertIsNotNone(self.world.clones.get(sandbox))
        (record,) = (self.directory / "pods").iterdir()
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (record, record.parent)]
        self.assertEqual(modes, [0o600, 0o700])
        self.successResultOf(start(self.world.sandboxes.stop(sandbox)))
        self.assertEqual(self.world.clones.ids(), [])
        self.assertEqual(list((self.directory / "pods").iterdir()), [])

    def test_a_removed_state_takes_nothing_from_it(self) -> None:
        sandbox = self.started()
        self.successResultOf(start(self.world.states.remove(self.state.id)))
        self.world.restart()
        self.created(sandbox, name="data", mounts=DATA)
        self.assertEqual(self.made_cold(self.agent_of(sandbox)), [])


class ContainerTests(StartCase):
    def setUp(self) -> None:
        super().setUp()
        self.clone = self.started()
        self.its = self.agent_of(self.clone)

    def test_kept_containers_go_on_as_the_pods(self) -> None:
        ids = [self.created(self.clone, name="data", mounts=DATA), self.created(self.clone)]
        self.assertEqual(self.made_cold(self.its), [])
        adopted = [(each.old_id, each.new_id) for some, _, _ in self.its.adopted for each in some]
        self.assertEqual(adopted, [(self.data, ids[0]), (self.container, ids[1])])
        renamed = [(volumes, its.metadata.uid) for some, volumes, its in self.its.adopted if not some]
        self.assertEqual(renamed, [({"/secret of u1": "/secret of u2"}, "u2"), ({}, "u2")])
        clone = self.world.clones.get(self.clone)
        self.assertEqual(clone and clone.containers, ())
        for id in ids:
            self.successResultOf(start(self.world.containers.start(id)))
        self.assertIn("a kept container goes on as the pod's: ", self.steps(self.clone))
        self.assertFalse(self.its.held)

    def test_its_volumes_are_the_pods_before_their_contents_are_brought(self) -> None:
        seen: list[set[str]] = []

        async def prepare(container: Any, config: Any) -> Any:
            seen.append(set(self.its.volumes))
            self.assertTrue(container.adopts)
            return config

        self.patch(self.world.secrets, "prepare", prepare)
        self.created(self.clone, name="data", mounts=DATA)
        self.assertEqual(seen, [{"/secret of u2"}])

    def test_one_that_was_not_kept_is_created(self) -> None:
        id = self.created(self.clone, name="new")
        self.assertEqual(self.made_cold(self.its), [id])

    def test_one_of_another_shape_is_created_and_the_kept_one_goes(self) -> None:
        id = self.created(self.clone, command=["other"])
        self.assertEqual(self.made_cold(self.its), [id])
        self.assertEqual(self.its.kept, {self.data})
        clone = self.world.clones.get(self.clone)
        self.assertEqual([each.name for each in clone.containers] if clone else [], ["data"])
        [step] = [each for each in self.steps(self.clone) if each.startswith("a container starts cold")]
        self.assertIn("its command is not that", step)

    def test_one_whose_volumes_differ_is_created(self) -> None:
        for mounts in ([], [*DATA, cri.Mount(container_path="/more", host_path="/secret")]):
            self.clone = self.started(f"u{len(mounts) + 10}")
            id = self.created(self.clone, name="data", mounts=mounts)
            self.assertEqual(self.made_cold(self.agent_of(self.clone)), [id])

    def test_one_whose_mounts_share_volumes_in_another_way_is_created(self) -> None:
        def mounts(one: str, other: str) -> list[cri.Mount]:
            return [cri.Mount(container_path=f"/{at}", host_path=each) for at, each in ((1, one), (2, other))]

        for number, (kept, its) in enumerate((("aa", "ab"), ("ab", "aa"), ("ab", "ba"), ("aa", "bb"))):
            self.pod_id = self.run_pod(name=f"kept-{number}", uid=f"k{number}")
            self.run_container(self.pod_id, mounts=mounts(*kept))
            self.kept(f"shared-{number}")
            self.clone = self.started(
                f"c{number}", annotations={"infranetes.io/start-from": f"shared-{number}"}
            )
            made = self.created(self.clone, mounts=mounts(*its))
            cold = [made] if number < 2 else []
            self.assertEqual(self.made_cold(self.agent_of(self.clone)), cold, (kept, its))

    def test_what_the_guest_refuses_is_created(self) -> None:
        for error in (InvalidArgument("config.mounts"), FailedPrecondition("there is one already")):
            self.clone = self.started(f"u{len(str(error))}")
            self.its = self.agent_of(self.clone)
            self.its.adopt_error = error
            id = self.created(self.clone)
            self.assertEqual(self.made_cold(self.its), [id])
            self.assertEqual(self.its.kept, {self.data})

    def test_one_that_may_not_start_cold_is_refused(self) -> None:
        self.clone = self.started("u3", annotations=OR_NOT)
        self.its = self.agent_of(self.clone)
        for _ in range(2):
            failure = self.failureResultOf(self.create(self.clone, command=["other"]), FailedPrecondition)
            self.assertIn("its command is not that", str(failure.value))
        self.assertEqual(self.made_cold(self.its), [])
        self.created(self.clone)

    def test_one_is_adopted_once(self) -> None:
        first = self.created(self.clone)
        self.successResultOf(start(self.world.containers.start(first)))
        self.successResultOf(start(self.world.containers.stop(first, 0)))
        for _ in range(2):
            second = self.created(self.clone, attempt=1)
            self.assertEqual(self.made_cold(self.its), [second])
            self.world.restart()
            self.its.calls.clear()
            self.successResultOf(start(self.world.containers.remove(second)))

    def test_a_lost_connection_is_tried_again(self) -> None:
        self.its.adopt_error = Unavailable("the connection is lost")
        self.failureResultOf(self.create(self.clone), Unavailable)
        self.its.adopt_error = None
        self.assertEqual(self.world.starts._adopting, {})
        self.created(self.clone)
        self.assertEqual(self.made_cold(self.its), [])

    def test_an_adoption_whose_answer_is_lost_is_undone_and_the_next_is_created(self) -> None:
        put, count = self.world.node.inventory.store.put_container, len(self.its.adopted)

        def fail(record: Any) -> Any:
            if len(self.its.adopted) > count + 1:
                raise Unavailable("the store can't be written")
            return put(record)

        self.patch(self.world.node.inventory.store, "put_container", fail)
        self.failureResultOf(self.create(self.clone), Unavailable)
        self.patch(self.world.node.inventory.store, "put_container", put)
        id = self.created(self.clone)
        self.assertEqual(self.made_cold(self.its), [id])
        self.assertEqual(set(self.its.containers), {id})

    def test_a_daemon_that_is_killed_meanwhile_has_it_created_again(self) -> None:
        async def never(*args: Any) -> Any:
            await Deferred()

        self.patch(self.world.secrets, "prepare", never)
        self.create(self.clone, name="data", mounts=DATA).addErrback(lambda _: None)
        self.assertEqual(self.its.volumes, {"/secret of u2"})
        self.world.restart()
        self.created(self.clone, name="data", mounts=DATA)
        self.assertEqual(self.made_cold(self.its), [])

    def test_a_vm_that_is_none_after_all_has_all_created(self) -> None:
        self.its.is_clone = False
        id = self.created(self.clone)
        self.assertEqual(self.made_cold(self.its), [id])

    def test_those_that_nobody_wants_are_removed_after_a_while(self) -> None:
        self.created(self.clone)
        sweep = self.world.starts.sweep
        self.successResultOf(start(sweep()))
        self.assertEqual(self.its.kept, {self.data})
        self.world.clock.advance(UNWANTED_SECONDS + 1)
        self.its.away = True
        self.successResultOf(start(sweep()))
        self.its.away = False
        for _ in range(2):
            self.successResultOf(start(sweep()))
            self.assertEqual(self.its.kept, set())
        id = self.created(self.clone, name="data", mounts=DATA)
        self.assertEqual(self.made_cold(self.its), [id])

    def test_one_whose_creation_has_failed_is_wanted_no_more(self) -> None:
        async def fail(container: Any, config: Any) -> Any:
            raise Unavailable("its secret can't be brought")

        self.patch(self.world.secrets, "prepare", fail)
        self.failureResultOf(self.create(self.clone, name="data", mounts=DATA), Unavailable)
        self.world.clock.advance(UNWANTED_SECONDS + 1)
        self.successResultOf(start(self.world.starts.sweep()))
        self.assertEqual(self.its.kept, set())

    def test_those_of_a_pod_that_is_lost_go_with_it(self) -> None:
        record = self.world.node.inventory.sandboxes[self.clone].record
        self.world.provider.end(record.instance_id, "killed")
        self.world.clock.advance(UNWANTED_SECONDS + 1)
        with mock.patch.object(starts, "_log") as log:
            self.successResultOf(start(self.world.starts.sweep()))
        self.assertEqual(log.mock_calls, [])

    def test_a_pass_forgets_pods_that_were_never_recorded(self) -> None:
        clone = self.world.clones.get(self.clone)
        assert clone is not None
        self.successResultOf(start(self.world.clones.put("e" * 32, clone)))
        self.successResultOf(start(self.world.starts.sweep()))
        self.assertEqual(self.world.clones.ids(), [self.clone])

    def test_one_that_is_being_given_to_the_pod_is_wanted(self) -> None:
        waiting: Deferred[None] = Deferred()

        async def wait(container: Any, config: Any) -> Any:
            await waiting
            return config

        self.patch(self.world.secrets, "prepare", wait)
        creating = self.create(self.clone, name="data", mounts=DATA)
        self.world.clock.advance(UNWANTED_SECONDS + 1)
        self.successResultOf(start(self.world.starts.sweep()))
        self.assertEqual(self.its.kept, {self.data})
        waiting.callback(None)
        self.successResultOf(creating)
        self.assertEqual(self.made_cold(self.its), [])

    def test_a_clone_is_kept_once_it_has_all_of_its_own(self) -> None:
        self.pod_id = self.clone
        first = self.created(self.clone)
        self.successResultOf(start(self.world.containers.start(first)))
        self.failureResultOf(self.keep("again"), FailedPrecondition)
        second = self.created(self.clone, name="data", mounts=DATA)
        self.successResultOf(start(self.world.containers.start(second)))
        self.kept("again")
