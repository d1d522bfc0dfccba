# SPDX-License-Identifier: Apache-2.0
"""What infranetes-ctl prints."""

from __future__ import annotations

import argparse
import json
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from infranetes.ctl.cli import parser, socket_of
from infranetes.ctl.render import as_json, as_text
from infranetes.ctl.tables import age
from infranetes_common.wire import control

OPTIONS = argparse.Namespace(dry_run=False)
SECOND = 10**9


def vm(**fields: Any) -> control.Vm:
    return control.Vm(id="i-1", state="running", address="10.0.0.1", sandbox_id="ab" * 16, **fields)


class RenderTests(SynchronousTestCase):
    def test_ages(self) -> None:
        for seconds, words in (
            (5, "5s"),
            (119, "119s"),
            (120, "2m"),
            (599, "9m59s"),
            (659, "10m"),
            (3 * 3600 - 1, "179m"),
            (3 * 3600, "3h"),
            (8 * 3600 - 1, "7h59m"),
            (8 * 3600, "8h"),
            (48 * 3600 - 1, "47h"),
            (49 * 3600, "2d1h"),
            (8 * 86400 - 1, "7d23h"),
            (86400 * 729, "729d"),
            (86400 * 731, "2y1d"),
            (86400 * 365 * 9, "9y"),
        ):
            self.assertEqual(age(1000 * SECOND, 1000.5 + seconds), words)
        self.assertEqual(age(0, 5.0), "-")
        self.assertEqual(age(10 * SECOND, 5.0), "0s", "a clock that is behind")

    def test_pods(self) -> None:
        pods = [
            control.Pod(
                id="ab" * 16, namespace="default", name="web", state="ready", vm=vm(cost_per_hour=0.1)
            ),
            control.Pod(id="cd" * 16, namespace="default", name="api", state="stopped"),
        ]
        answer = control.ListPodsResponse(provider="aws", pods=pods)
        lines = as_text("pods", answer, OPTIONS).splitlines()
        self.assertEqual(lines[0].split()[:4], ["NAMESPACE", "NAME", "READY", "STATUS"])
        self.assertEqual(lines[1].split()[:4], ["default", "api", "0/0", "stopped"])
        self.assertEqual((lines[0].split()[-1], lines[1].split()[-1]), ("SANDBOX", "cdcdcdcdcdcdc"))
        self.assertIn("0.1000", lines[2])
        self.assertIn("2 pods, 0.1000 USD an hour for 1 VM", lines[3])
        document = json.loads(json.dumps(as_json("pods", answer, OPTIONS)))
        self.assertEqual([one["name"] for one in document["pods"]], ["web", "api"])
        self.assertEqual(document["pods"][0]["vm"]["cost_per_hour"], 0.1)
        self.assertIsNone(document["pods"][1]["vm"])

    def test_why_a_pod_is_not_well_is_told_briefly(self) -> None:
        long = "no capacity\n" + "in zone a " * 40
        failed = control.Pod(id="ab" * 16, namespace="default", name="web", state="failed", message=long)
        well = control.Pod(id="cd" * 16, namespace="default", name="api", state="ready", vm=vm())
        text = as_text("pods", control.ListPodsResponse(provider="aws", pods=[failed, well]), OPTIONS)
        head, _, row, counted = text.splitlines()
        self.assertEqual(head.split()[-2:], ["WHY", "SANDBOX"])
        self.assertRegex(row, r"default +web +0/0 +failed")
        self.assertRegex(row, "no capacity in zone a in zone a.*… +ababababababa$")
        self.assertLess(len(row), 260)
        self.assertTrue(counted.startswith("1 pod, and 1 that failed to launch"), counted)
        self.assertNotIn("WHY", as_text("pods", control.ListPodsResponse(pods=[well]), OPTIONS))
        document = as_json("pods", control.ListPodsResponse(pods=[failed]), OPTIONS)
        self.assertEqual([each["message"] for each in document["pods"]], [long])  # type: ignore[attr-defined]

    def test_prices_have_a_column_only_where_one_is_known(self) -> None:
        free = control.Pod(id="ab" * 16, namespace="default", name="web", state="ready", vm=vm())
        priced = control.Pod(
            id="cd" * 16, namespace="default", name="api", state="ready", vm=vm(cost_per_hour=0.1)
        )
        for pods, shown in (([free], False), ([free, priced], True)):
            text = as_text("pods", control.ListPodsResponse(provider="qemu", pods=pods), OPTIONS)
            self.assertEqual("USD" in text, shown, text)
        for one, shown in ((vm(), False), (vm(cost_per_hour=0.1), True)):
            text = as_text("orphans", control.ListOrphansResponse(vms=[one]), OPTIONS)
            self.assertEqual("USD" in text, shown, text)
            pool = control.GetPoolResponse(vms=[control.Pooled(vm=one, state="idle")], wanted=1)
            self.assertEqual("USD" in as_text("pool", pool, OPTIONS), shown)

    def test_trouble_is_told(self) -> None:
        aws = control.Provider(name="aws", trouble="no credentials")
        answer = control.ListPodsResponse(provider="qemu", providers=[control.Provider(name="qemu"), aws])
        text = as_text("pods", answer, OPTIONS)
        self.assertIn("aws is not ready: no credentials", text)
        self.assertNotIn("qemu is not ready", text)

    def test_orphans_and_their_end(self) -> None:
        self.assertEqual(as_text("orphans", control.ListOrphansResponse(), OPTIONS), "no orphans")
        text = as_text("orphans", control.ListOrphansResponse(vms=[vm()]), OPTIONS)
        self.assertIn("1 orphan", text)
        ended = control.EndOrphansResponse(
            ended=[vm()], failed=[control.Failure(vm=control.Vm(id="i-2"), error="throttled")]
        )
        text = as_text("end-orphans", ended, OPTIONS)
        self.assertIn("1 orphan ended", text)
        self.assertIn("i-2 is not ended: throttled", text)
        text = as_text("end-orphans", ended, argparse.Namespace(dry_run=True))
        self.assertIn("would be ended", text)

    def test_providers_that_can_not_tell_their_orphans_are_named(self) -> None:
        troubles = ["aws is not ready: no credentials"]
        for name, answer in (
            ("orphans", control.ListOrphansResponse(troubles=troubles)),
            ("end-orphans", control.EndOrphansResponse(troubles=troubles)),
            ("end-orphans", control.EndOrphansResponse(ended=[vm()], troubles=troubles)),
        ):
            options = argparse.Namespace(dry_run=False)
            self.assertIn("no credentials", as_text(name, answer, options))
            self.assertEqual(as_json(name, answer, options)["troubles"], troubles)
            self.assertNotEqual(as_text(name, answer, options).splitlines()[0], "no orphans")

    def test_the_pool(self) -> None:
        members = [control.Pooled(id="ab" * 16, state=state, vm=vm()) for state in ("idle", "booting")]
        text = as_text("pool", control.GetPoolResponse(wanted=2, vms=members, trouble="quota"), OPTIONS)
        self.assertIn("1 of 2 VMs wait for pods", text)
        self.assertIn("the last launch failed: quota", text)
        self.assertIn("drained", as_text("pool", control.GetPoolResponse(drained=True), OPTIONS))
        left = control.DrainPoolResponse(left=members[:1])
        self.assertIn("i-1 is not ended yet", as_text("drain", left, OPTIONS))
        self.assertIn("nothing to fill", as_text("fill", control.FillPoolResponse(), OPTIONS))


class CommandLineTests(SynchronousTestCase):
    def test_the_socket_is_the_daemons(self) -> None:
        path = self.mktemp()
        with open(path, "w") as file:
            file.write('run_dir = "/run/elsewhere"\n')
        found = socket_of(parser().parse_args(["pods", "--config", path]))
        self.assertEqual(str(found), "/run/elsewhere/control.sock")
        found = socket_of(parser().parse_args(["pods", "--config", path, "--socket", "/s"]))
        self.assertEqual(str(found), "/s")
