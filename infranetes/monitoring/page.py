# SPDX-License-Identifier: Apache-2.0
"""The page of a node: an `Overview` in parts, and as a document."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

import attrs
from twisted.web.template import Tag, tags

from infranetes.monitoring import html
from infranetes.monitoring.html import Cell, Part
from infranetes.monitoring.overview import Overview, Pod, PoolOverview, Provider
from infranetes.monitoring.recent_warnings import Warned
from infranetes.observer import Launch, LaunchKind, LaunchStep

_WIDTH, _HEIGHT = 500, 14  # of a launch's bar, in pixels
_KINDS = {
    LaunchKind.NEW: "new",
    LaunchKind.CLAIMED: "was there",
    LaunchKind.STARTED: "was stopped",
    LaunchKind.POOL: "for the pool",
}
_POD_HEADS = ("Pod", "State", "Age", "Containers", "Address", "VM", "Size", "Agent", "Sandbox", "Message")
_ROW = "pod-"  # before the ids of rows


def node_parts(shown: Overview) -> dict[str, Part]:
    """Return the parts of the page, by their ids, in the order in which they are told."""
    return {
        "head": _Head(shown.node, shown.cluster, shown.version, shown.trouble, shown.states, shown.cost),
        "providers": _Providers(tuple(shown.providers)),
        "pods-title": _PodsTitle(len(shown.pods) + shown.more_pods),
        **{f"{_ROW}{pod.id}": _PodRow(pod) for pod in shown.pods},
        "pods-end": _PodsEnd(len(shown.pods), shown.more_pods),
        "launches": _Launches(tuple(shown.launches)),
        "pools": _Pools(tuple(shown.pools)),
        "warnings": _Warnings(tuple(shown.warnings)),
    }


def thd_node_page(shown: Overview) -> bytes:
    """Return the page. This takes a while: call it in a thread."""
    made = {id: part.shown(id, shown.now) for id, part in node_parts(shown).items()}
    rows = [tag for id, tag in made.items() if id.startswith(_ROW)]
    return html.document(
        html.cleaned(shown.node),
        "",
        {"data-live": "live"},
        tags.header(made["head"], html.controls(shown.now)),
        html.element(
            "main",
            {},
            html.section("Providers", made["providers"]),
            html.section(
                made["pods-title"],
                _filter(),
                tags.div(html.table(_POD_HEADS, rows, {"id": "pods"}), made["pods-end"], class_="pods"),
            ),
            html.section("Launches", _legend(), made["launches"]),
            html.section("Pool", made["pools"]),
            html.section("Warnings and errors", made["warnings"]),
        ),
        html.keys(
            ("/", "search"),
            ("j k ↓ ↑", "next, previous pod"),
            ("Enter", "open the pod"),
            ("Esc", "leave the search"),
            ("d", "light, dark"),
        ),
    )


@attrs.frozen
class _Head(Part):
    """What the node is, and how it does. :ivar states: how many pods are in each state."""

    node: str
    cluster: str
    version: str
    trouble: str
    states: Sequence[tuple[str, int]]
    cost: float | None

    def tag(self, now: float | None) -> Tag:
        ready = html.mark("not ready" if self.trouble else "ready", good=not self.trouble)
        tiles = [
            tags.li(tags.b(str(count)), " ", html.mark(state, good=state == "ready"))
            for state, count in self.states
        ]
        if self.cost is not None:
            tiles.append(tags.li(tags.b(f"{self.cost:.2f}"), " USD an hour"))
        return tags.div(
            tags.h1(self.node, " ", ready),
            tags.p(f"Infranetes {self.version}, cluster {self.cluster}. ", tags.a("metrics", href="metrics")),
            tags.p(self.trouble, class_="trouble") if self.trouble else "",
            tags.ul(*tiles, class_="tiles") if tiles else "",
        )


@attrs.frozen
class _Providers(Part):
    providers: Sequence[Provider]

    def tag(self, now: float | None) -> Tag:
        heads = ("Provider", "State", "Pods", "VMs that no record knows", "Why")
        rows = (
            (
                one.name,
                html.mark("not ready" if one.trouble else "ready", good=not one.trouble),
                str(one.pods),
                str(one.orphans),
                one.trouble,
            )
            for one in self.providers
        )
        return tags.div(html.rows_or(heads, rows, "none"))


@attrs.frozen
class _PodsTitle(Part):
    pods: int

    def tag(self, now: float | None) -> Tag:
        return tags.h2(f"Pods and their VMs ({self.pods})")


@attrs.frozen
class _PodsEnd(Part):
    """What stands below the pods. :ivar more: how many are not shown."""

    pods: int
    more: int

    def tag(self, now: float | None) -> Tag:
        if self.more:
            return tags.p(f"{self.more} older ones are not shown.")
        return tags.p("" if self.pods else "There are no pods.", class_="empty")


@attrs.frozen
class _PodRow(Part):
    pod: Pod

    def tag(self, now: float | None) -> Tag:
        pod = self.pod
        cells: Sequence[Cell] = (
            tags.a(pod.name, href=_page_of(pod.id)),
            html.mark(pod.state, good=pod.state == "ready"),
            html.age(pod.created_at, now),
            f"{pod.running} of {pod.containers} run" if pod.containers else "",
            pod.address,
            _vm(pod),
            pod.size if pod.cost is None else f"{pod.size} {pod.cost:.4f} USD/h",
            _agent(pod),
            html.short_id(pod.id),
            pod.message,
        )
        row = html.row(_POD_HEADS, cells)
        row.attributes.update(
            {"data-at": f"{pod.created_at:.3f}", "data-namespace": pod.namespace, "data-state": pod.state}
        )
        return row


@attrs.frozen
class _Launches(Part):
    launches: Sequence[Launch]

    def tag(self, now: float | None) -> Tag:
        longest = max((one.seconds for one in self.launches), default=0.0)
        heads = ("Began", "Pod", "VM", "Provider", "Seconds", "Steps", "Outcome")
        rows = (_launch(one, now, longest) for one in self.launches)
        return tags.div(html.rows_or(heads, rows, "None since the daemon started."))


@attrs.frozen
class _Pools(Part):
    pools: Sequence[PoolOverview]

    def tag(self, now: float | None) -> Tag:
        rows = (
            (
                one.handler or "all others",
                str(one.target),
                ", ".join(f"{count} {state}" for state, count in one.states) or "none",
                "it is drained" if one.drained else one.trouble,
            )
            for one in self.pools
        )
        return tags.div(
            html.rows_or(("Handler", "Wanted", "There are", "Why not more"), rows, "There is none.")
        )


@attrs.frozen
class _Warnings(Part):
    warnings: Sequence[Warned]

    def tag(self, now: float | None) -> Tag:
        rows = ((html.ago(one.at, now), html.mark(one.level, good=False), one.text) for one in self.warnings)
        return tags.div(html.rows_or(("When", "Level", "What"), rows, "None since the daemon started."))


def _page_of(sandbox_id: str) -> str:
    return f"pods/{quote(sandbox_id, safe='')}"


def _vm(pod: Pod) -> Cell:
    words = f"{pod.vm} ({pod.provider})" if pod.vm else pod.provider
    return tags.span(words, " ", tags.a("screen", href=f"screens/{pod.id}")) if pod.screen else words


def _agent(pod: Pod) -> Cell:
    live = pod.reach == "live"
    return (
        html.mark(pod.way if pod.way and live else pod.reach, good=live or pod.reach == "asleep")
        if pod.reach
        else ""
    )


def _filter() -> Tag:
    """Return what chooses pods, which the script shows and works."""
    search = tags.input(type="search", id="search", placeholder="name, address, VM, message")
    return html.element(
        "form",
        {"id": "filter", "role": "search", "hidden": ""},
        tags.label("Search ", search),
        tags.label("Namespace ", tags.select(tags.option("all", value=""), id="namespace")),
        tags.label("State ", tags.select(tags.option("all", value=""), id="state")),
        tags.output(id="chosen"),
    )


def _legend() -> Tag:
    steps = [tags.span(step.value, class_=f"legend {step.value}") for step in LaunchStep]
    return tags.p(*steps, class_="legends")


def _launch(launch: Launch, now: float | None, longest: float) -> Sequence[Cell]:
    failed = f"{launch.steps[-1][0].value}: {launch.reason}" if launch.reason else "ready"
    pod = tags.a(launch.pod, href=_page_of(launch.id)) if launch.pod else html.short_id(launch.id)
    return (
        html.ago(launch.began, now),
        pod,
        _KINDS[launch.kind],
        launch.provider,
        f"{launch.seconds:.2f}",
        _bar(launch, longest),
        tags.div(html.mark(failed, good=not launch.reason), " ", launch.message),
    )


def _bar(launch: Launch, longest: float) -> Tag:
    """Show the steps one after the other, to the scale of the longest launch."""
    scale = _WIDTH / longest if longest else 0.0
    parts, at = [], 0.0
    for step, seconds in launch.steps:
        width = seconds * scale
        part = html.element("rect", {}, html.element("title", {}, f"{step.value}: {seconds:.3f} s"))
        parts.append(part(x=f"{at:.1f}", y="0", width=f"{width:.1f}", height=str(_HEIGHT), class_=step.value))
        at += width
    steps = ", ".join(f"{step.value} {seconds:.2f} s" for step, seconds in launch.steps)
    bar = html.element("svg", {"preserveAspectRatio": "none", "aria-label": steps}, *parts)
    return bar(role="img", width=str(_WIDTH), height=str(_HEIGHT), viewBox=f"0 0 {_WIDTH} {_HEIGHT}")
