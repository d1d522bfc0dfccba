# SPDX-License-Identifier: Apache-2.0
"""The page: its content, that nothing on it is executed, and that many pods do not block the reactor."""

from __future__ import annotations

from html.parser import HTMLParser

import attrs
from twisted.trial.unittest import SynchronousTestCase

from infranetes.monitoring.html import POLICY, thd_own_file
from infranetes.monitoring.overview import Overview, Pod, PoolOverview, Provider
from infranetes.monitoring.page import node_parts, thd_node_page
from infranetes.monitoring.recent_warnings import Warned
from infranetes.observer import Launch, LaunchKind, LaunchStep

STYLE = thd_own_file("style.css")
EVIL = "<script>alert('x')</script>\"&"
STEPS = ((LaunchStep.REQUEST, 1.0), (LaunchStep.BOOT, 2.0), (LaunchStep.AGENT, 1.0))


def pod(name: str, message: str = "") -> Pod:
    return Pod(
        "0123456789abcdef", name, "ready", 1000.0, 1, 2, "aws", "i-1", "m5.large", "10.0.0.1", "live", message
    )


def launch(pod: str = "default/web", reason: str = "", message: str = "") -> Launch:
    return Launch("0123456789abcdef", pod, "aws", LaunchKind.NEW, 1000.0, STEPS, reason, message)


EMPTY = Overview(4600.0, "east", "node-1", "1.0", "", [Provider("aws", "", 0, 0)], [], 0, [], [], [])


class Elements(HTMLParser):
    """Collects every element of a document with its attributes, and all text."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page.decode())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


class PageTests(SynchronousTestCase):
    """The pages made from overviews."""

    def page(self, shown: Overview) -> Elements:
        return Elements(thd_node_page(shown))

    def test_a_node_without_anything(self) -> None:
        text = self.page(EMPTY).text
        for words in ("node-1", "ready", "There are no pods.", "None since the daemon started."):
            self.assertIn(words, text)

    def test_pods_launches_the_pool_and_errors(self) -> None:
        shown = attrs.evolve(
            EMPTY,
            trouble="the cloud refuses the credentials",
            pods=[pod("default/web", "the agent is away")],
            more_pods=7,
            launches=[launch(), launch("default/bad", "resource_exhausted", "the quota is full")],
            pools=[PoolOverview("gpu", 3, (("booting", 1), ("idle", 2)), False, "no capacity")],
            warnings=[Warned(4590.0, "warn", "something is strange")],
        )
        text = self.page(shown).text
        for words in (
            "not ready",
            "the cloud refuses the credentials",
            "Pods and their VMs (8)",
            "default/web",
            "1 of 2 run",
            "10.0.0.1",
            "i-1 (aws)",
            "the agent is away",
            "7 older ones are not shown.",
            "agent: resource_exhausted",
            "the quota is full",
            "gpu",
            "1 booting, 2 idle",
            "no capacity",
            "10 s ago",
            "something is strange",
        ):
            self.assertIn(words, text)

    def test_a_launch_is_a_bar_of_its_steps_to_the_scale_of_the_longest(self) -> None:
        half = attrs.evolve(launch(), steps=((LaunchStep.BOOT, 2.0),))
        elements = self.page(attrs.evolve(EMPTY, launches=[launch(), half])).elements
        bars = [attributes for tag, attributes in elements if tag == "rect"]
        self.assertEqual(
            [(bar["class"], bar["x"], bar["width"]) for bar in bars],
            [
                ("request", "0.0", "125.0"),
                ("boot", "125.0", "250.0"),
                ("agent", "375.0", "125.0"),
                ("boot", "0.0", "250.0"),
            ],
        )

    def test_launches_that_took_no_time(self) -> None:
        page = self.page(
            attrs.evolve(EMPTY, launches=[attrs.evolve(launch(), steps=((LaunchStep.BOOT, 0.0),))])
        )
        self.assertIn(("rect"), [tag for tag, _ in page.elements])

    def test_every_text_is_escaped(self) -> None:
        evil = attrs.evolve(
            EMPTY,
            node=EVIL,
            cluster=EVIL,
            trouble=EVIL,
            providers=[Provider(EVIL, EVIL, 0, 0)],
            pods=[attrs.evolve(pod(EVIL, EVIL), id=EVIL, vm=EVIL, size=EVIL, address=EVIL)],
            launches=[launch(EVIL, EVIL, EVIL), attrs.evolve(launch(""), id=EVIL)],
            pools=[PoolOverview(EVIL, 0, (), False, EVIL)],
            warnings=[Warned(0.0, "warn", EVIL)],
        )
        page = self.page(evil)
        self.assertEqual([each for tag, each in page.elements if tag == "script"], [{"src": "page.js"}])
        self.assertGreater(page.text.count(EVIL), 10)
        attributes = [each for _, given in page.elements for each in given]
        self.assertEqual([each for each in attributes if each.startswith("on")], [])

    def test_no_text_has_secrets(self) -> None:
        secret = "no answer: https://me:hunter2@proxy.example"
        shown = attrs.evolve(
            EMPTY,
            trouble=secret,
            providers=[Provider("aws", secret, 0, 0)],
            pods=[pod("default/web", secret)],
            launches=[launch("default/bad", "unavailable", secret)],
            pools=[PoolOverview("gpu", 3, (("booting", 1),), False, secret)],
            warnings=[Warned(4590.0, "warn", secret)],
        )
        text = self.page(shown).text
        self.assertNotIn("hunter2", text)
        self.assertEqual(text.count("no answer: https://(hidden)@proxy.example"), 6)

    def test_it_loads_nothing_but_its_own_files(self) -> None:
        page = self.page(attrs.evolve(EMPTY, pods=[pod("default/web")], launches=[launch()]))
        given = [attributes for _, attributes in page.elements]
        links = {value for each in given for name, value in each.items() if name in ("src", "href")}
        self.assertEqual(links, {"style.css", "page.js", "metrics", "data:,", "pods/0123456789abcdef"})
        self.assertEqual([each for each in given if "style" in each], [])
        for words in (b"url(", b"@import"):
            self.assertNotIn(words, STYLE)

    def test_nothing_is_executed_but_its_script(self) -> None:
        """Its Content-Security-Policy allows nothing else."""
        page = self.page(attrs.evolve(EMPTY, pods=[pod("default/web")], launches=[launch()]))
        scripts = [attributes for tag, attributes in page.elements if tag == "script"]
        self.assertEqual(scripts, [{"src": "page.js"}])
        self.assertNotIn("unsafe", POLICY)
        for words in (b"eval(", b"Function(", b"document.write", b"http:", b"https:"):
            self.assertNotIn(words, thd_own_file("page.js"))

    def test_without_scripts_it_is_loaded_again_and_again(self) -> None:
        tags = [tag for tag, _ in self.page(EMPTY).elements]
        self.assertEqual(tags[tags.index("noscript") + 1], "meta")
        metas = [attributes for tag, attributes in self.page(EMPTY).elements if tag == "meta"]
        self.assertIn({"http-equiv": "refresh", "content": "10"}, metas)

    def test_a_part_is_the_same_whenever_it_is_made(self) -> None:
        """Else every row would be sent anew every second."""
        shown = attrs.evolve(EMPTY, pods=[pod("default/web")], launches=[launch()])
        later = attrs.evolve(shown, now=shown.now + 60.0)
        self.assertEqual(node_parts(shown), node_parts(later))
        self.assertNotEqual(
            node_parts(shown), node_parts(attrs.evolve(shown, pods=[pod("default/web", "ill")]))
        )

    def test_a_part_is_the_element_with_its_id_in_the_page(self) -> None:
        shown = attrs.evolve(EMPTY, pods=[pod("default/web")], launches=[launch()])
        of_page = {attributes.get("id"): tag for tag, attributes in self.page(shown).elements}
        for id, part in node_parts(shown).items():
            tag, attributes = Elements(part.html(id).encode()).elements[0]
            self.assertEqual((tag, attributes.get("id")), (of_page[id], id))

    def test_costs_are_shown_where_they_are_known(self) -> None:
        dear = attrs.evolve(pod("default/web"), id="fedcba9876543210", cost=0.096)
        shown = attrs.evolve(EMPTY, pods=[dear, pod("default/db")], cost=0.096)
        text = self.page(shown).text
        self.assertIn("m5.large 0.0960 USD/h", text)
        self.assertIn("0.10\n USD an hour", text)
        self.assertNotIn("USD", self.page(attrs.evolve(EMPTY, pods=[pod("default/db")])).text)

    def test_long_texts_are_cut(self) -> None:
        text = self.page(attrs.evolve(EMPTY, pods=[pod("default/web", "word " * 10_000)])).text
        self.assertLess(len(text), 6000)

    def test_a_narrow_window_has_what_it_shows_each_cell_with(self) -> None:
        page = self.page(attrs.evolve(EMPTY, pods=[pod("default/web")]))
        heads = [attributes.get("data-head") for tag, attributes in page.elements if tag == "td"]
        self.assertLessEqual({"Provider: ", "Pod: ", "Address: "}, {*heads})
        metas = [attributes for tag, attributes in page.elements if tag == "meta"]
        self.assertIn({"name": "viewport", "content": "width=device-width"}, metas)

    def test_the_style_knows_every_step(self) -> None:
        for step in LaunchStep:
            self.assertIn(f"rect.{step.value} ".encode(), STYLE)
