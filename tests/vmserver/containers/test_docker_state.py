# SPDX-License-Identifier: Apache-2.0
"""Docker's ContainerInspect is translated to a ContainerState."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.wire import cri
from vmserver.containers.docker.names import LABEL_ID
from vmserver.containers.docker.state import container_state


def inspected(**state: Any) -> Any:
    """Return the part of ContainerInspect that is used."""
    never = "0001-01-01T00:00:00Z"
    first = {"Status": "exited", "ExitCode": 0, "Error": "", "OOMKilled": False, "Pid": 0}
    return {
        "Config": {"Labels": {LABEL_ID: "c1"}},
        "HostConfig": {},
        "Created": "2026-01-01T00:00:00Z",
        "Image": "sha256:1",
        "State": {**first, "StartedAt": never, "FinishedAt": never, **state},
    }


class ContainerStateTests(SynchronousTestCase):
    def test_a_short_life_does_not_end_before_it_began(self) -> None:
        state = container_state(
            inspected(StartedAt="2026-01-01T00:00:01.000000500Z", FinishedAt="2026-01-01T00:00:01.000000100Z")
        )
        self.assertEqual(state.state, cri.CONTAINER_EXITED)
        self.assertEqual(state.started_at % 1000, 500)
        self.assertEqual(state.finished_at, state.started_at)

    def test_reasons(self) -> None:
        started = {"StartedAt": "2026-01-01T00:00:01Z", "FinishedAt": "2026-01-01T00:00:02Z"}
        for fields, reason, code in (
            ({}, "Completed", 0),
            ({"ExitCode": 3}, "Error", 3),
            ({"ExitCode": 137, "OOMKilled": True}, "OOMKilled", 137),
            ({"ExitCode": 0, "OOMKilled": True}, "Completed", 0),
            ({"ExitCode": 3, "OOMKilled": True}, "Error", 3),
        ):
            state = container_state(inspected(**started, **fields))
            self.assertEqual((state.reason, state.exit_code), (reason, code))

    def test_one_that_never_ran_has_the_time_of_its_creation(self) -> None:
        state = container_state(inspected(Status="created", Error="no such file", ExitCode=127))
        self.assertEqual((state.reason, state.exit_code), ("ContainerCannotRun", 127))
        self.assertEqual((state.started_at, state.finished_at), (state.created_at, state.created_at))
        self.assertEqual(state.message, "no such file")
