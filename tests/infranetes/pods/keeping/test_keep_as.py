# SPDX-License-Identifier: Apache-2.0
"""Pods that are kept because they ask for it, and states that are removed because nobody does."""

from __future__ import annotations

from typing import Any
from unittest import mock

import attrs

from infranetes.machines.keeping import Hook
from infranetes.pods.keeping.config import KeptConfig
from infranetes.pods.keeping.keep_as import MOST_TEMPLATES, RETRY_SECONDS, TRIES
from infranetes.pods.keeping.states import KeptState, Stage
from infranetes_common.concurrency import start
from infranetes_common.config import Bytes
from infranetes_common.errors import AlreadyExists, FailedPrecondition, InvalidArgument, Unavailable
from tests.infranetes.pods.fakes import box, pod
from tests.infranetes.pods.keeping.kept_case import SECRET, KeptCase

AS = {"infranetes.io/keep-as": "warm"}
DAY = 86400.0


class KeepAsCase(KeptCase):
    """The tests run pods that ask to be kept."""

    def begin(self, uid: str = "u2", **fields: Any) -> str:
        """Run a pod with a container that the agent says has run since."""
        given: dict[str, Any] = {"annotations": AS, **fields}
        self.pod_id = self.run_pod(name="asks", uid=uid, **given)
        return self.run_container(self.pod_id)

    def passes(self, seconds: float = 31.0) -> None:
        """Let time pass, then a pass over the pods."""
        self.world.clock.advance(seconds)
        self.successResultOf(start(self.world.keep_as.sweep()))

    def names(self) -> list[tuple[str, str]]:
        return [(each.name, each.pod) for each in self.world.states]


class KeepAsTests(KeepAsCase):
    def test_a_pod_is_kept_once_its_containers_have_run_for_a_while(self) -> None:
        self.begin()
        self.passes(5.0)
        self.assertEqual(self.names(), [])
        self.passes()
        self.assertEqual(self.names(), [("warm", "default/asks")])
        self.assert_pod_runs()
        for _ in range(2):
            self.passes()
        self.assertEqual(len(self.keeping.asked), 1)

    def test_the_while_is_the_pods_to_say(self) -> None:
        self.begin(annotations={**AS, "infranetes.io/keep-after": "300"})
        self.passes(290.0)
        self.assertEqual(self.names(), [])
        self.passes(11.0)
        self.assertEqual(len(self.names()), 1)

    def test_other_pods_are_not_kept(self) -> None:
        self.passes()
        self.assertEqual(self.keeping.asked, [])

    def test_a_pod_with_a_container_that_is_still_to_start_waits(self) -> None:
        self.begin()
        second = self.successResultOf(start(self.world.containers.create(self.pod_id, box("second"))))
        self.passes()
        self.assertEqual(self.names(), [])
        self.successResultOf(start(self.world.containers.start(second)))
        self.passes(1.0)
        self.passes()
        (state,) = self.world.states
        self.assertEqual({each.name for each in state.containers}, {"main", "second"})

    def test_a_pod_without_containers_or_whose_vm_is_gone_is_not_kept(self) -> None:
        self.pod_id = self.run_pod(name="asks", uid="u2", annotations=AS)
        self.passes()
        self.begin("u3")
        self.world.provider.end(str(self.sandbox.record.instance_id), "killed")
        self.passes()
        self.assertEqual(self.keeping.asked, [])

    def test_one_of_another_size_replaces_it(self) -> None:
        self.begin()
        self.passes()
        self.begin("u3", annotations={**AS, "infranetes.io/memory": "1Gi"})
        self.passes()
        self.assertEqual((len(self.keeping.asked), len(self.names())), (2, 1))

    def test_of_replicas_one_is_kept(self) -> None:
        for uid in ("u2", "u3", "u4"):
            self.begin(uid)
        for _ in range(4):
            self.passes()
        self.assertEqual(len(self.keeping.asked), 1)

    def test_the_next_daemon_keeps_none_again(self) -> None:
        self.begin()
        self.passes()
        self.world.restart()
        self.passes()
        self.assertEqual(len(self.keeping.asked), 1)

    def test_one_of_other_containers_replaces_it(self) -> None:
        self.begin()
        self.passes()
        (first,) = self.world.states
        self.pod_id = self.run_pod(name="asks", uid="u3", annotations=AS)
        self.run_container(self.pod_id, args=["--new"])
        self.passes()
        (second,) = self.world.states
        self.assertNotEqual(first.id, second.id)

    def test_one_that_no_vm_starts_from_any_more_is_replaced(self) -> None:
        self.begin()
        self.passes()
        self.keeping.check_error = FailedPrecondition("it is of another QEMU")
        self.begin("u3")
        self.passes()
        self.assertEqual((len(self.keeping.asked), len(self.names())), (2, 1))

    def test_an_update_has_a_state_of_its_own_and_the_oldest_goes(self) -> None:
        for number in range(MOST_TEMPLATES + 2):
            self.begin(f"u{number + 2}", labels={"pod-template-hash": f"v{number}"})
            self.passes(RETRY_SECONDS)
        templates = [f"v{number}" for number in range(2, MOST_TEMPLATES + 2)]
        self.assertEqual(sorted(each.template for each in self.world.states), templates)

    def test_one_that_can_not_be_kept_is_tried_once_and_says_so(self) -> None:
        self.keeping.error = FailedPrecondition("a secret is open")
        self.begin()
        for _ in range(3):
            self.passes(RETRY_SECONDS + 1)
        self.assertEqual(len(self.keeping.asked), 1)
        steps = [each.error for each in self.sandbox.timeline.steps]
        self.assertIn("a secret is open", steps)
        self.assert_pod_runs()

    def test_one_that_can_not_be_kept_now_is_tried_again_some_times(self) -> None:
        self.keeping.error = Unavailable("the hypervisor does not answer")
        self.begin()
        self.passes()
        self.passes()
        self.assertEqual(len(self.keeping.asked), 1)
        for _ in range(TRIES + 2):
            self.passes(RETRY_SECONDS + 1)
        self.assertEqual(len(self.keeping.asked), TRIES)

    def test_one_at_a_time(self) -> None:
        self.keeping.waits = True
        self.begin("u2", labels={"pod-template-hash": "a"})
        self.begin("u3", labels={"pod-template-hash": "b"})
        for _ in range(3):
            self.passes()
        self.assertEqual(len(self.keeping.asked), 1)

    def test_while_another_is_being_kept_so_it_waits_and_is_kept_if_that_fails(self) -> None:
        self.begin()
        self.passes()
        (state,) = self.world.states
        made, self.keeping.asked = state, []
        self.world.states.note(attrs.evolve(made, stage=Stage.KEEPING))
        self.begin("u3")
        for _ in range(TRIES + 1):
            self.passes(RETRY_SECONDS + 1)
        self.assertEqual(self.keeping.asked, [])
        self.successResultOf(start(self.world.states.remove(made.id)))
        self.passes()
        self.assertEqual((len(self.keeping.asked), len(self.names())), (1, 1))

    def test_one_that_meets_another_at_its_name_is_tried_as_often_as_it_takes(self) -> None:
        self.begin()
        with mock.patch.object(self.world.keeper, "keep", side_effect=AlreadyExists("being kept")):
            for _ in range(TRIES + 1):
                self.passes(RETRY_SECONDS + 1)
        self.passes()
        self.assertEqual(len(self.names()), 1)

    def test_nothing_is_remembered_of_one_that_is_gone(self) -> None:
        self.keeping.error = Unavailable("the hypervisor does not answer")
        self.begin()
        for _ in range(TRIES):
            self.passes(RETRY_SECONDS + 1)
        self.assertTrue(self.world.keep_as._done and self.world.keep_as._tries)
        self.successResultOf(start(self.world.sandboxes.stop(self.pod_id)))
        self.assertNotIn(self.pod_id, {*self.world.keep_as._done, *self.world.keep_as._tries})

    def test_malformed_annotations_are_refused(self) -> None:
        for name, value in (
            ("keep-as", "a/b"),
            ("keep-after", "-1"),
            ("keep-after", "1h"),
            ("keep-secrets", "perhaps"),
            ("before-keep", "SIGKILL"),
            ("before-keep", "sh -c x"),
            ("after-clone", '{"main": "x"}'),
            ("after-clone", '{"main": []}'),
            ("after-clone", '{"main": ["SIGUSR2"]}'),
            ("after-clone", '{"main": [1]}'),
            ("after-clone", "{" * 2000),
        ):
            config = pod(uid="u9", annotations={**AS, f"infranetes.io/{name}": value})
            failure = self.failureResultOf(start(self.world.sandboxes.run(config, "")), InvalidArgument)
            self.assertIn(f"infranetes.io/{name}", str(failure.value))


class HookTests(KeepAsCase):
    def test_containers_are_told_before_and_after(self) -> None:
        hooks = {
            "infranetes.io/before-keep": '{"main": ["/flush", "--all"], "other": "SIGHUP"}',
            "infranetes.io/after-clone": "SIGUSR2",
            "infranetes.io/start-from": "warm",
        }
        main = self.begin(annotations={**AS, **hooks})
        other, third = (self.run_container(self.pod_id, name=each) for each in ("other", "third"))
        self.passes()
        ((told, volumes, secrets),) = self.agent.holds
        self.assertEqual(told[main], Hook(("/flush", "--all")))
        self.assertEqual((told[other].signal, other in told, third in told), (1, True, False))
        self.assertEqual((volumes, secrets), ({SECRET}, False))
        self.begin("u3", annotations={**AS, **hooks})
        [adoption] = [each for some, _, _ in self.agent_of(self.pod_id).adopted for each in some]
        self.assertEqual((adoption.hook.signal, adoption.hook.command), (12, ()))

    def test_the_named_one_counts_and_all_else_has_none(self) -> None:
        hooks = {"infranetes.io/after-clone": '{"other": "SIGHUP"}', "infranetes.io/start-from": "warm"}
        self.begin(annotations={**AS, **hooks})
        self.passes()
        self.begin("u3", annotations={**AS, **hooks})
        [adoption] = [each for some, _, _ in self.agent_of(self.pod_id).adopted for each in some]
        self.assertIsNone(adoption.hook)

    def test_secrets_are_kept_where_the_pod_says_so(self) -> None:
        self.begin(annotations={**AS, "infranetes.io/keep-secrets": "true"})
        self.passes()
        self.assertEqual([each[2] for each in self.agent.holds], [True])
        (state,) = self.world.states
        self.assertTrue(state.secrets)


class CollectionTests(KeptCase):
    def collect(self, seconds: float = 0.0) -> None:
        self.world.clock.advance(seconds)
        self.successResultOf(start(self.world.collection.sweep()))

    def made(self, *names: str) -> list[KeptState]:
        return [self.kept(name) for name in names]

    def configure(self, **keys: Any) -> None:
        self.world.config = self.world.collection._config = KeptConfig(**keys)

    def setUp(self) -> None:
        super().setUp()
        self.world.clock.advance(1_700_000_000.0)  # when states are kept, as the provider says

    def left_names(self) -> list[str]:
        return sorted(each.name for each in self.world.states)

    def test_states_that_nobody_uses_are_removed(self) -> None:
        old, _ = self.made("old", "used")
        self.collect(13 * DAY)
        self.assertEqual(self.left_names(), ["old", "used"])
        used = self.world.states.named("default", "used")[0]
        self.world.states._used[used.id] = self.world.clock.seconds()
        self.collect(2 * DAY)
        self.assertEqual(self.left_names(), ["used"])
        self.assertFalse((self.directory / "states" / old.id).exists())

    def test_where_all_take_too_much_the_least_used_go(self) -> None:
        states = self.made("a", "b", "c")
        for number, state in enumerate(states):
            self.world.states._used[state.id] = self.world.clock.seconds() + number
        self.configure(max_bytes=Bytes(states[0].size * 2))
        self.collect(self.world.node.times.launch + 10)
        self.assertEqual(self.left_names(), ["b", "c"])

    def test_what_a_pod_may_be_starting_from_stays(self) -> None:
        (state,) = self.made("a")
        self.configure(max_bytes=Bytes(0))
        self.world.states._used[state.id] = self.world.clock.seconds()
        self.collect(10.0)
        self.assertEqual(self.left_names(), ["a"])
        self.collect(self.world.node.times.launch)
        self.assertEqual(self.left_names(), [])

    def test_one_that_can_not_be_removed_is_tried_again(self) -> None:
        self.made("a")
        real = self.world.states.remove

        async def fail(id: str) -> None:
            raise FailedPrecondition("the disk is gone")

        self.patch(self.world.states, "remove", fail)
        self.collect(15 * DAY)
        self.patch(self.world.states, "remove", real)
        self.collect()
        self.assertEqual(self.left_names(), [])
