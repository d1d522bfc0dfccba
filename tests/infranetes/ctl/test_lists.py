# SPDX-License-Identifier: Apache-2.0
"""Lists of pods, containers and events as commands print them."""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import yaml
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from infranetes.ctl.cli import read
from infranetes.ctl.commands import COMMANDS
from infranetes.ctl.session import DONE, Session
from infranetes_common.concurrency import start
from infranetes_common.errors import NotFound
from infranetes_common.wire import control

NANOS = 10**9
NOW = 1_800_000_000.5
WEB = control.PodOfEntry(sandbox_id="aa" * 16, namespace="default", name="web", labels={"app": "web"})
DNS = control.PodOfEntry(sandbox_id="bb" * 16, namespace="kube-system", name="dns")


def container(id: str, name: str, seconds: int = 300, **fields: Any) -> control.PodContainer:
    at = int((NOW - seconds) * NANOS)
    return control.PodContainer(id=id * 16, name=name, image="busybox", created_at=at, **fields)


class _Daemon:
    """A daemon with two pods, and three containers."""

    def __init__(self) -> None:
        self.asked: list[control.ListPodsRequest | control.ListEventsRequest] = []
        self.trouble = ""

    async def ListPods(self, request: control.ListPodsRequest, timeout: float) -> control.ListPodsResponse:
        self.asked.append(request)
        pods = [
            control.Pod(
                id=each.sandbox_id,
                namespace=each.namespace,
                name=each.name,
                labels=each.labels,
                state="ready",
                containers=2,
                running=1,
                addresses=["10.88.0.2"],
                created_at=int((NOW - 150) * NANOS),
            )
            for each in (WEB, DNS)
        ]
        gone = [control.Pod(id="cc" * 16, namespace="default", name="old", state="removed")]
        return control.ListPodsResponse(
            pods=[*pods, *(gone if request.past else [])],
            providers=[control.Provider(name="qemu", trouble=self.trouble)],
        )

    async def ListContainers(
        self, request: object, timeout: float
    ) -> AsyncIterator[control.ListContainersResponse]:
        for pod, each in (
            (WEB, container("a1", "main", state="running")),
            (WEB, container("a2", "setup", 900, state="exited", finished_at=1, exit_code=3, reason="Error")),
            (DNS, container("b1", "main", 600, state="running")),
        ):
            listed = control.ListedContainer(pod=pod, container=each)
            yield control.ListContainersResponse(containers=[listed])

    async def ListEvents(
        self, request: control.ListEventsRequest, timeout: float
    ) -> AsyncIterator[control.ListEventsResponse]:
        self.asked.append(request)
        now = int(NOW * NANOS)
        for pod, step in (
            (DNS, control.Step(what="the VM starts", began_at=now - 90 * NANOS, ended_at=now - 80 * NANOS)),
            (WEB, control.Step(what="the VM starts", began_at=now - 60 * NANOS, ended_at=now - 55 * NANOS,
                               error="no capacity", detail="zone a")),
            (WEB, control.Step(what="an image is pulled", container="main", began_at=now - 5 * NANOS)),
        ):  # fmt: skip
            yield control.ListEventsResponse(events=[control.Event(pod=pod, step=step)])


class ListCase(SynchronousTestCase):
    def setUp(self) -> None:
        self.daemon = _Daemon()
        self.patch(time, "time", lambda: NOW)

    def run_it(self, *words: str) -> tuple[Deferred[int], str, str]:
        """Run a command. Return how it ends, and what is printed on both streams."""
        options = read(words)
        daemon: Any = self.daemon
        reactor: Any = None
        out, told = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(told):
            ended = start(COMMANDS[options.command].run(Session(reactor, daemon, options)))
        return ended, out.getvalue(), told.getvalue()

    def said(self, *words: str) -> str:
        ended, out, _ = self.run_it(*words)
        self.assertEqual(self.successResultOf(ended), DONE)
        return out

    def rows(self, *words: str) -> list[list[str]]:
        return [line.split() for line in self.said(*words, "--no-headers").splitlines()]


class PodTests(ListCase):
    def test_columns_are_kubectls_with_the_sandbox_last(self) -> None:
        head, row, *_ = self.said("get", "pods").splitlines()
        self.assertEqual(
            head.split(), ["NAMESPACE", "NAME", "READY", "STATUS", "AGENT", "AGE", "IP", "VM", "SANDBOX"]
        )
        self.assertEqual(
            row.split(),
            ["default", "web", "1/2", "ready", "-", "2m30s", "10.88.0.2", "-", WEB.sandbox_id[:13]],
        )
        wide = self.said("pods", "-o", "wide").splitlines()[0]
        self.assertEqual(wide.split()[7:10], ["VM", "PROVIDER", "SIZE"])

    def test_all_ways_of_writing_it_mean_the_same(self) -> None:
        said = self.said("pods")
        for words in ("get pods", "get pod", "get po", "-A get pods", "pods -A", "get --all-namespaces pods"):
            self.assertEqual(self.said(*words.split()), said, words)

    def test_some_of_them(self) -> None:
        for words, names in (
            ("-n default", ["web"]),
            ("-l app=web", ["web"]),
            ("dns", ["dns"]),
            ("kube-system/d", ["dns"]),
            ("pod/web -A", ["web"]),
            ("-n kube-system -l app=web", []),
        ):
            self.assertEqual([row[1] for row in self.rows("get", "pods", *words.split())], names, words)

    def test_one_that_is_not_there_fails(self) -> None:
        ended, out, _ = self.run_it("get", "pods", "wbe")
        self.assertIn("did you mean web?", str(self.failureResultOf(ended, NotFound).value))
        self.assertEqual(out, "")

    def test_those_that_are_gone_if_asked_for(self) -> None:
        self.assertNotIn("old", self.said("pods"))
        self.assertIn("2 pods, and 1 that is gone", self.said("pods", "--all"))
        self.assertIn("old", self.said("pods", "-a", "-q", "-o", "name", "old") + self.said("pods", "-a"))

    def test_ids_and_names_alone(self) -> None:
        self.assertEqual(self.said("pods", "-q"), f"{WEB.sandbox_id}\n{DNS.sandbox_id}\n")
        self.assertEqual(self.said("get", "pods", "-o", "name"), "pod/web\npod/dns\n")
        self.assertEqual(self.said("pods", "-q", "-n", "nowhere"), "")

    def test_documents(self) -> None:
        found = json.loads(self.said("get", "pods", "-o", "json", "-n", "default"))
        self.assertEqual(found, json.loads(self.said("--json", "pods", "-n", "default")))
        self.assertEqual(found, yaml.safe_load(self.said("pods", "-o", "yaml", "-n", "default")))
        (pod,) = found["pods"]
        self.assertEqual((pod["name"], pod["running"], pod["labels"]), ("web", 1, {"app": "web"}))

    def test_without_headers_the_rows_are_alone_and_troubles_elsewhere(self) -> None:
        self.daemon.trouble = "no credentials"
        ended, out, told = self.run_it("pods", "--no-headers")
        self.assertEqual(self.successResultOf(ended), DONE)
        self.assertEqual(len(out.splitlines()), 2)
        self.assertIn("qemu is not ready: no credentials", told)
        self.assertIn("qemu is not ready: no credentials", self.said("pods"))


class ContainerTests(ListCase):
    def test_those_that_run_the_newest_first(self) -> None:
        head, *rows, counted = self.said("ps").splitlines()
        self.assertEqual(
            head.split(),
            ["NAMESPACE", "POD", "NAME", "STATUS", "ATTEMPT", "AGE", "IMAGE", "CONTAINER"],
        )
        self.assertEqual([row.split()[:3] for row in rows],
                         [["default", "web", "main"], ["kube-system", "dns", "main"]])  # fmt: skip
        self.assertIn("2 containers running", counted)

    def test_all_with_how_they_ended(self) -> None:
        rows = self.rows("ps", "--all")
        self.assertEqual(rows[-1][:5], ["default", "web", "setup", "exited", "3"])

    def test_some_of_them(self) -> None:
        for words, ids in (
            ("--pod web", ["a1"]),
            ("--pod web -a", ["a1", "a2"]),
            ("-n kube-system", ["b1"]),
            ("-l app=web", ["a1"]),
            ("setup", ["a2"]),
            ("a2", ["a2"]),
        ):
            found = self.said("get", "containers", "-q", *words.split()).split()
            self.assertEqual(found, [id * 16 for id in ids], words)

    def test_documents(self) -> None:
        found = json.loads(self.said("ps", "-a", "--json"))["containers"]
        self.assertEqual(found[-1]["exit_code"], 3)
        self.assertEqual(found[-1]["pod"]["name"], "web")


class EventTests(ListCase):
    def test_the_newest_last(self) -> None:
        head, *rows = [line.split() for line in self.said("events").splitlines()]
        self.assertEqual(head, ["LAST", "SEEN", "TYPE", "TOOK", "OBJECT", "CONTAINER", "MESSAGE"])
        self.assertEqual(rows[0][:5], ["80s", "Normal", "10s", "kube-system/dns", "-"])
        self.assertEqual(" ".join(rows[1][5:]), "the VM starts: zone a: no capacity")
        self.assertEqual(rows[2][:5], ["5s", "Normal", "...", "default/web", "main"])

    def test_some_of_them(self) -> None:
        self.assertEqual([row[1] for row in self.rows("get", "events", "--failed")], ["Warning"])
        self.assertEqual(len(self.rows("events", "-n", "default")), 2)
        self.assertEqual(len(self.rows("events", "-l", "app=web")), 2)
        self.said("events", "-n", "default", "web", "--since", "90s")
        request = self.daemon.asked[-1]
        self.assertEqual(request.pod, "default/web")
        self.assertLess(abs(request.since / NANOS - time.time() + 90), 60)

    def test_documents(self) -> None:
        found = json.loads(self.said("events", "--json"))["events"]
        self.assertEqual([each["type"] for each in found], ["Normal", "Warning", "Normal"])
        self.assertEqual(len({each["id"] for each in found}), 3)
        self.assertEqual((found[1]["error"], found[1]["pod"]["name"]), ("no capacity", "web"))
        self.assertTrue(found[2]["under_way"])
