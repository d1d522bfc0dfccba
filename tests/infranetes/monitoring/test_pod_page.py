# SPDX-License-Identifier: Apache-2.0
"""The page of a pod: its content, and that nothing that a pod or a guest wrote is executed."""

from __future__ import annotations

from typing import Any

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.monitoring.pod_page import (
    MAX_CONSOLE,
    MAX_ROWS,
    gone_parts,
    launch_window,
    moment,
    pod_parts,
    thd_pod_page,
    took,
)
from infranetes.monitoring.pod_view import Mount, PodView, Volume
from infranetes_common.wire import control
from tests.infranetes.monitoring.test_page import EVIL, Elements

S = 10**9
AT = 1_700_000_000 * S


def described(**fields: Any) -> control.DescribePodResponse:
    """Return what is known of a pod that runs. Any: the message's fields."""
    return control.DescribePodResponse(
        pod=control.Pod(
            id="0123456789abcdef",
            namespace="default",
            name="web",
            uid="u1",
            state="ready",
            created_at=AT,
            provider="aws",
            agent="live",
            size="m5.large",
            addresses=["10.0.0.1"],
            vm=control.Vm(id="i-1", state="running", cost_per_hour=0.096),
        ),
        **fields,
    )


VIEW = PodView(described(), (), (), ())


class PodPageTests(SynchronousTestCase):
    def page(self, view: PodView) -> Elements:
        return Elements(thd_pod_page(view, "node-1", "../", "0123456789abcdef", AT / S + 60))

    def test_the_facts_and_the_cost(self) -> None:
        text = self.page(VIEW).text
        for words in (
            "default/web",
            "ready",
            "i-1 running",
            "0.0960 USD an hour",
            "10.0.0.1",
            "2023-11-14 22:13:20.000 UTC",
            "It has no persistent volumes.",
        ):
            self.assertIn(words, text)
        self.assertNotIn("\nGuest\n", text)

    def test_it_leads_back_to_its_row_and_follows_its_stream(self) -> None:
        elements = self.page(VIEW).elements
        (up,) = [each for tag, each in elements if tag == "a"]
        self.assertEqual((up["id"], up["href"]), ("up", "../#pod-0123456789abcdef"))
        (body,) = [each for tag, each in elements if tag == "body"]
        self.assertEqual(body["data-live"], "../live/0123456789abcdef")

    def test_a_pod_without_anything(self) -> None:
        """Such as one whose launch has failed."""
        pod = control.Pod(id="0123", namespace="default", name="web", state="failed", message="no room")
        text = self.page(PodView(control.DescribePodResponse(pod=pod), (), (), (), no_console="none")).text
        for words in ("failed", "no room", "Nothing since the daemon started.", "none"):
            self.assertIn(words, text)
        for words in ("USD", "\nVM\n", "\nAgent\n"):
            self.assertNotIn(words, text)

    def test_the_timeline_with_what_failed_and_what_is_under_way(self) -> None:
        steps = [
            control.Step(what="make a VM", began_at=AT, ended_at=AT + 2 * S, detail="m5.large"),
            control.Step(what="reach its agent", began_at=AT + 2 * S, ended_at=AT + 4 * S, error="refused"),
            control.Step(what="wait", began_at=AT + 3 * S),
            control.Step(
                what="container ended", began_at=AT + 900 * S, ended_at=AT + 901 * S, container="main"
            ),
        ]
        page = self.page(PodView(described(steps=steps, left_out=3), (), (), ()))
        bars = [(each["class"], each["x"], each["width"]) for tag, each in page.elements if tag == "rect"]
        self.assertEqual(
            bars,
            [("took", "0.0", "150.0"), ("failed", "150.0", "150.0"), ("under-way", "225.0", "75.0")],
            "what came much later is not drawn to the launch's scale",
        )
        drawn = [(each["viewbox"], each["width"]) for tag, each in page.elements if tag == "svg"]
        self.assertEqual(drawn, [("0 0 300 12", "300")] * 3)
        for words in ("2.000 s", "...", "refused", "main", "3 steps in between are not kept."):
            self.assertIn(words, page.text)

    def test_containers_volumes_mounts_and_events(self) -> None:
        container = control.PodContainer(
            id="f" * 64, name="main", state="exited", image="busybox", started_at=AT, finished_at=AT + S,
            exit_code=137, reason="OOMKilled",
        )  # fmt: skip
        event = control.Event(
            pod=control.PodOfEntry(sandbox_id="9" * 32), step=control.Step(what="launch failed", began_at=AT)
        )
        view = PodView(
            described(containers=[container]),
            [event],
            (Volume("vol-1", "aws", ""), Volume("vol-2", "aws", "disk2")),
            (Mount("main", "/data", "/var/lib/x", True), Mount("main", "/tmp", "/var/lib/y", False)),
        )
        mounts = self.cells(pod_parts(view)["mounts"].html("mounts"))
        self.assertEqual([row[-1] for row in mounts], ["read", "read and write"])
        self.assertEqual(self.cells(pod_parts(view)["containers"].html("containers"))[0][-1], "OOMKilled")
        text = self.page(view).text
        for words in (
            "137",
            "OOMKilled",
            "9" * 13,
            "launch failed",
            "not attached yet",
            "disk2",
            "/data",
            "read",
        ):
            self.assertIn(words, text)

    def test_policies(self) -> None:
        allowed = control.Allowed(networks=["10.0.0.0/8", "b", "c", "d"], network_count=4, ports=["tcp 80"])
        policies = control.PodPolicies(
            known=True,
            current=True,
            ingress=control.Direction(allowed=[allowed]),
            egress=control.Direction(),
            policies=[control.Policy(name="default/web", ingress=True, egress=True)],
        )
        rows = self.rows(policies)
        self.assertEqual(
            rows,
            [
                ["receives", "10.0.0.0/8, b, c and 1 more", "tcp 80", "default/web"],
                ["sends", "nothing", "default/web"],
            ],
        )
        self.assertEqual(
            self.rows(control.PodPolicies(known=True, current=True))[0], ["receives", "everything"]
        )
        closed = self.rows(control.PodPolicies(trouble="it is away"))
        nothing = ["nothing yet", "it is away"]
        self.assertEqual(closed, [["receives", *nothing], ["sends", *nothing]])
        few = control.Direction(allowed=[control.Allowed(networks=["a", "b", "c"], network_count=3)])
        one = self.rows(control.PodPolicies(known=True, current=True, egress=few))
        self.assertEqual(one, [["receives", "everything"], ["sends", "a, b, c", "all"]])
        late = self.rows(control.PodPolicies(known=True, trouble="it is away"))
        self.assertIn("it is away", late[-1])

    def rows(self, policies: control.PodPolicies) -> list[list[str]]:
        return self.cells(pod_parts(attrs.evolve(VIEW, policies=policies))["policies"].html("policies"))

    def cells(self, part: str) -> list[list[str]]:
        """Return the words in each row of a table's body."""
        rows = part.partition("<tbody>")[2].split("</tr>")[:-1]
        return [[word for word in Elements(row.encode()).text.split("\n") if word] for row in rows]

    def test_a_guest(self) -> None:
        guest = control.Guest(
            way="none", state="crashed", finished_at=AT, reason="panic",
            troubles=[control.WayTrouble(way="ssh", trouble="refused")],
        )  # fmt: skip
        text = self.page(PodView(described(guest=guest), (), (), ())).text
        for words in ("crashed since 2023-11-14", "panic", "its console alone", "Not by ssh", "refused"):
            self.assertIn(words, text)
        reached = control.Guest(way="ssh", state="running", started_at=AT)
        text = self.page(PodView(described(guest=reached), (), (), ())).text
        self.assertIn("running since 2023-11-14", text)
        self.assertIn("\nReached by\nssh\n", text)

    def test_the_agent_is_told_unless_a_way_into_its_guest_is(self) -> None:
        self.assertIn("\nAgent\nlive\n", self.page(VIEW).text)
        other = described()
        other.pod.way, other.pod.handler = "ssh", "gpu"
        text = self.page(PodView(other, (), (), ())).text
        self.assertNotIn("\nAgent\n", text)
        self.assertIn("\nProvider\naws, handler gpu\n", text)

    def test_an_event_is_told_with_what_there_is_of_detail_and_error(self) -> None:
        words = [("", ""), ("m5.large", ""), ("", "refused"), ("m5.large", "refused")]
        events = [
            control.Event(step=control.Step(what="launch", began_at=AT, detail=detail, error=error))
            for detail, error in words
        ]
        rows = self.cells(pod_parts(attrs.evolve(VIEW, events=events))["events"].html("events"))
        self.assertEqual([row[2:] for row in rows], [[], ["m5.large"], ["refused"], ["m5.large; refused"]])

    def test_a_console_is_reached_by_keys(self) -> None:
        (console,) = [
            each for tag, each in self.page(attrs.evolve(VIEW, console="login:")).elements if tag == "pre"
        ]
        self.assertEqual(console, {"tabindex": "0", "role": "region", "aria-label": "console"})

    def test_one_of_which_nothing_is_known_any_more(self) -> None:
        self.assertIn("it is gone", gone_parts("it is gone")["head"].html("head"))

    def test_everything_that_a_pod_or_a_guest_wrote_is_escaped(self) -> None:
        """Names, labels, images, messages, paths, steps, consoles."""
        pod = control.Pod(
            id=EVIL, namespace=EVIL, name=EVIL, uid=EVIL, state=EVIL, message=EVIL, provider=EVIL, agent=EVIL,
            handler=EVIL, size=EVIL, addresses=[EVIL], labels={EVIL: EVIL},
            vm=control.Vm(id=EVIL, state=EVIL, detail=EVIL),
        )  # fmt: skip
        container = control.PodContainer(
            id=EVIL, name=EVIL, state=EVIL, image=EVIL, reason=EVIL, message=EVIL
        )
        step = control.Step(what=EVIL, began_at=AT, container=EVIL, detail=EVIL, error=EVIL)
        guest = control.Guest(way=EVIL, state=EVIL, trouble=EVIL, reason=EVIL, message=EVIL)
        direction = control.Direction(allowed=[control.Allowed(networks=[EVIL], ports=[EVIL])])
        view = PodView(
            control.DescribePodResponse(pod=pod, containers=[container], steps=[step], guest=guest),
            [control.Event(pod=control.PodOfEntry(sandbox_id=EVIL), step=step)],
            [Volume(EVIL, EVIL, EVIL)],
            [Mount(EVIL, EVIL, EVIL, False)],
            EVIL,
            "",
            control.PodPolicies(
                known=True,
                trouble=EVIL,
                ingress=direction,
                policies=[control.Policy(name=EVIL, ingress=True)],
            ),
        )
        html = thd_pod_page(view, EVIL, "../", EVIL, AT / S)
        page = Elements(html)
        scripts = [each for tag, each in page.elements if tag == "script"]
        self.assertEqual(scripts, [{"src": "../page.js"}])
        self.assertGreater(page.text.count(EVIL), 30)
        attributes = [name for _, each in page.elements for name in each]
        self.assertEqual([each for each in attributes if each.startswith("on")], [])
        links = [each["href"] for tag, each in page.elements if tag == "a"]
        self.assertEqual([each for each in links if "<" in str(each) or "script:" in str(each)], [])
        for id, part in pod_parts(view).items():
            self.assertNotIn("<script", part.html(id), id)

    def test_what_a_console_has_that_no_text_has_is_a_question_mark(self) -> None:
        """Escape sequences, the halves of surrogates, and characters that turn the direction of a line."""
        view = attrs.evolve(VIEW, console="a\x1b[2Jb\0c\ud800d\u202ee\r\nf\tg")
        self.assertIn("a?[2Jb?c?d?e?\nf\tg", self.page(view).text)
        name = control.DescribePodResponse(pod=control.Pod(name="a\u202eb\x07"))
        self.assertIn("a?b?", self.page(attrs.evolve(VIEW, described=name)).text)

    def test_a_consoles_end_without_secrets(self) -> None:
        console = "x" * 100_000 + "\nhttps://me:hunter2@proxy.example\nlogin:"
        text = self.page(attrs.evolve(VIEW, console=console)).text
        self.assertIn("login:", text)
        self.assertNotIn("hunter2", text)
        self.assertLess(text.count("x"), MAX_CONSOLE + 100)

    def test_many_of_anything_are_bounded(self) -> None:
        containers = [control.PodContainer(id=str(each)) for each in range(10_000)]
        mounts = [Mount("main", "/" + "p" * 10_000, "", False)] * 1000
        view = PodView(described(containers=containers), (), (), mounts)
        parts = pod_parts(view)
        self.assertEqual(parts["containers"].html("containers").count("<tr>"), 1 + MAX_ROWS)
        self.assertLess(len(parts["mounts"].html("mounts")), 300_000)

    def test_a_part_is_the_same_whenever_it_is_made(self) -> None:
        copy = control.DescribePodResponse.FromString(described().SerializeToString())
        self.assertEqual(pod_parts(VIEW), pod_parts(PodView(copy, (), (), ())))


class WordsTests(SynchronousTestCase):
    def test_times(self) -> None:
        self.assertEqual(
            (moment(0), took(5, 5), took(5, 0), took(0, 1_500_000_000)), ("", "", "...", "1.500 s")
        )

    def test_a_date_is_told_once_a_day(self) -> None:
        steps = [control.Step(what="a", began_at=AT + day * 86400 * S) for day in (0, 0, 1, 1)]
        text = Elements(pod_parts(PodView(described(steps=steps), (), (), ()))["timeline"].html("t").encode())
        times = [words for words in text.text.split("\n") if ":13:20" in words]
        first, second = "2023-11-14 ", "2023-11-15 "
        clock = "22:13:20.000"
        self.assertEqual(times, [first + clock, clock, second + clock, clock])

    def test_no_launch(self) -> None:
        self.assertEqual(launch_window([]), (0, 0))
