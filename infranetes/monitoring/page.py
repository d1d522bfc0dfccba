# SPDX-License-Identifier: Apache-2.0
"""The page: an `Overview` as HTML without scripts and without secrets. twisted.web escapes every text."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import TypeGuard, cast

import attrs
from twisted.python.failure import Failure
from twisted.web.template import Tag, flattenString, tags

from infranetes.monitoring.overview import Overview, Pod, PoolOverview, Provider
from infranetes.monitoring.recent_warnings import Warned
from infranetes.observer import Launch, LaunchKind, LaunchStep
from infranetes_common.redaction import redacted

HTML = "text/html; charset=utf-8"
CSS = "text/css; charset=utf-8"
REFRESH_SECONDS = 10
_SHORT = 13  # characters of an id, as crictl shows it
_WIDTH, _HEIGHT = 500, 14  # of a launch's bar, in pixels
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_KINDS = {LaunchKind.NEW: "new VM", LaunchKind.CLAIMED: "VM was there", LaunchKind.POOL: "for the pool"}

Cell = Tag | str


def style() -> bytes:
    """Return the page's style sheet."""
    return (files("infranetes.monitoring") / "style.css").read_bytes()


def _thd_page(shown: Overview) -> bytes:
    """Return the page. This takes a while: call it in a thread."""
    return flattened(_document(cast(Overview, _redacted(shown))))


def flattened(document: Tag) -> bytes:
    """Return the HTML of a document without Deferreds."""
    pages: list[bytes | Failure] = []
    flattenString(None, document).addBoth(pages.append)  # fires at once: there are no Deferreds in it
    (page,) = pages
    if isinstance(page, Failure):
        page.raiseException()
    return b"<!DOCTYPE html>\n" + page


def _redacted(value: object) -> object:
    """Return a value in which every text, at any depth, is without secrets: errors may quote some."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, list | tuple):
        return type(value)(map(_redacted, value))
    if _has_fields(value):
        fields = {each.name: _redacted(getattr(value, each.name)) for each in attrs.fields(type(value))}
        return type(value)(**fields)
    return value


def _has_fields(value: object) -> TypeGuard[attrs.AttrsInstance]:
    return attrs.has(type(value))


def _document(shown: Overview) -> Tag:
    ready = "not ready" if shown.trouble else "ready"
    return tags.html(
        tags.head(
            tags.meta(charset="utf-8"),
            tags.meta(name="viewport", content="width=device-width"),  # else phones pretend to be 980 wide
            Tag("meta", attributes={"http-equiv": "refresh", "content": str(REFRESH_SECONDS)}),
            tags.title(f"{shown.node}: Infranetes"),
            tags.link(rel="stylesheet", href="style.css"),
        ),
        tags.body(
            tags.h1(shown.node, " ", _mark(ready, good=not shown.trouble)),
            tags.p(
                f"Infranetes {shown.version}, cluster {shown.cluster}, "
                f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(shown.now))} UTC. ",
                tags.a("metrics", href="metrics"),
            ),
            tags.p(shown.trouble, class_="trouble") if shown.trouble else "",
            _section("Providers", _providers(shown.providers)),
            _section(f"Pods and their VMs ({len(shown.pods) + shown.more_pods})", _pods(shown)),
            _section("Launches", _launches(shown)),
            _section("Pool", _pools(shown.pools)),
            _section("Warnings and errors", _warnings(shown)),
        ),
        lang="en",
    )


def _section(title: str, content: Tag) -> Tag:
    return Tag("section", children=[tags.h2(title), content])


def _table(heads: Sequence[str], rows: Iterable[Sequence[Cell]], empty: str) -> Tag:
    found = [tags.tr(*[_cell(head, cell) for head, cell in zip(heads, row, strict=True)]) for row in rows]
    if not found:
        return tags.p(empty, class_="empty")
    return tags.table(tags.thead(tags.tr(*[tags.th(head) for head in heads])), tags.tbody(*found))


def _cell(head: str, cell: Cell) -> Tag:
    """Return a cell that knows its head, which a narrow window shows in it."""
    return Tag("td", attributes={"data-head": f"{head}: "} if head else {}, children=[cell] if cell else [])


def _mark(text: str, *, good: bool) -> Tag:
    return tags.span(text, class_="good" if good else "bad")


def _providers(providers: Sequence[Provider]) -> Tag:
    return _table(
        ("Provider", "", "Pods", "VMs that no record knows", "Why"),
        (
            (
                one.name,
                _mark("not ready" if one.trouble else "ready", good=not one.trouble),
                str(one.pods),
                str(one.orphans),
                one.trouble,
            )
            for one in providers
        ),
        "none",
    )


def _pods(shown: Overview) -> Tag:
    heads = ("Pod", "State", "Age", "Containers", "Address", "VM", "Size", "Agent", "Sandbox", "Message")
    table = _table(heads, (_pod(one, shown.now) for one in shown.pods), "There are no pods.")
    more = tags.p(f"{shown.more_pods} older ones are not shown.") if shown.more_pods else ""
    return tags.div(table, more)


def _pod(pod: Pod, now: float) -> Sequence[Cell]:
    return (
        pod.name,
        _mark(pod.state, good=pod.state == "ready"),
        _duration(now - pod.created_at),
        f"{pod.running} of {pod.containers} run" if pod.containers else "",
        pod.address,
        _vm(pod),
        pod.size,
        _agent(pod),
        tags.code(pod.id[:_SHORT], title=pod.id),
        pod.message,
    )


def _vm(pod: Pod) -> Cell:
    words = f"{pod.vm} ({pod.provider})" if pod.vm else pod.provider
    return tags.span(words, " ", tags.a("screen", href=f"screens/{pod.id}")) if pod.screen else words


def _agent(pod: Pod) -> Cell:
    live = pod.reach == "live"
    return _mark(pod.way if pod.way and live else pod.reach, good=live) if pod.reach else ""


def _launches(shown: Overview) -> Tag:
    longest = max((one.seconds for one in shown.launches), default=0.0)
    legend = tags.p(
        *[tags.span(step.value, class_=f"legend {step.value}") for step in LaunchStep], class_="legends"
    )
    heads = ("Began", "Pod", "", "Provider", "Seconds", "Steps", "Outcome")
    table = _table(
        heads, (_launch(one, shown.now, longest) for one in shown.launches), "None since the daemon started."
    )
    return tags.div(legend, table)


def _launch(launch: Launch, now: float, longest: float) -> Sequence[Cell]:
    failed = f"{launch.steps[-1][0].value}: {launch.reason}" if launch.reason else "ready"
    return (
        f"{_duration(now - launch.began)} ago",
        launch.pod or tags.code(launch.id[:_SHORT], title=launch.id),
        _KINDS[launch.kind],
        launch.provider,
        f"{launch.seconds:.2f}",
        _bar(launch, longest),
        tags.div(_mark(failed, good=not launch.reason), " ", launch.message),
    )


def _bar(launch: Launch, longest: float) -> Tag:
    """Show the steps one after the other, to the scale of the longest launch."""
    scale = _WIDTH / longest if longest else 0.0
    parts, at = [], 0.0
    for step, seconds in launch.steps:
        width = seconds * scale
        part = Tag("rect", children=[Tag("title", children=[f"{step.value}: {seconds:.3f} s"])])
        part(x=f"{at:.1f}", y="0", width=f"{width:.1f}", height=str(_HEIGHT), class_=step.value)
        parts.append(part)
        at += width
    bar = Tag("svg", attributes={"preserveAspectRatio": "none"}, children=list(parts))
    return bar(role="img", width=str(_WIDTH), height=str(_HEIGHT), viewBox=f"0 0 {_WIDTH} {_HEIGHT}")


def _pools(pools: Sequence[PoolOverview]) -> Tag:
    return _table(
        ("Handler", "Wanted", "There are", "Why not more"),
        (
            (
                one.handler or "all others",
                str(one.target),
                ", ".join(f"{count} {state}" for state, count in one.states) or "none",
                "it is drained" if one.drained else one.trouble,
            )
            for one in pools
        ),
        "There is none.",
    )


def _warnings(shown: Overview) -> Tag:
    return _table(
        ("When", "", "What"),
        ((f"{_duration(shown.now - one.at)} ago", *_warned(one)) for one in shown.warnings),
        "None since the daemon started.",
    )


def _warned(one: Warned) -> Sequence[Cell]:
    return _mark(one.level, good=False), one.text


def _duration(seconds: float) -> str:
    for unit, name in _UNITS:
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name}"
    return "0 s"
