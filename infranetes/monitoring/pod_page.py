# SPDX-License-Identifier: Apache-2.0
"""The page of a pod: a `PodView` in parts, and as a document."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from urllib.parse import quote

import attrs
from twisted.web.template import Tag, tags

from infranetes.monitoring import html
from infranetes.monitoring.html import Part
from infranetes.monitoring.pod_view import PodView
from infranetes_common.redaction import redacted_end
from infranetes_common.wire import control

MAX_CONSOLE = 16 * 1024  # characters of a console's end
MAX_ROWS = 100  # of containers, mounts, volumes and policies' rules
_NANOS = 10**9
_GAP = 60 * _NANOS  # without a step, after which what follows is not the launch any more
_DATE = len("2026-01-01 ")
_WIDTH, _HEIGHT = 300, 12  # of a step's bar, in pixels
_ENDED = ("off", "crashed")  # the states of guests that do not execute any more


def pod_parts(view: PodView) -> dict[str, Part]:
    """Return the parts of the page, by their ids."""
    answer = view.described
    pod = answer.pod
    return {
        "head": _Head(f"{pod.namespace}/{pod.name}", pod.state, pod.message),
        "facts": _Facts(tuple(_facts(answer))),
        "timeline": _Timeline(tuple(map(_step, answer.steps)), answer.left_out),
        "containers": _Table(_CONTAINERS, _rows(map(_container, answer.containers)), "It has none."),
        "events": _Table(_EVENTS, _rows(map(_event, view.events)), "Nothing since the daemon started."),
        "volumes": _Table(
            ("Volume", "Provider", "In the VM"),
            _rows((each.id, each.provider, each.disk or "not attached yet") for each in view.volumes),
            "It has no persistent volumes.",
        ),
        "mounts": _Table(
            ("Container", "Path", "From", "Access"),
            _rows((each.container, each.path, each.source, _access(each.read_only)) for each in view.mounts),
            "No container has mounts.",
        ),
        "policies": _Table(_POLICIES, _rows(_policies(view)), view.no_policies),
        "console": _Console(view.console, view.no_console),
    }


def gone_parts(why: str) -> dict[str, Part]:
    """Return the parts of the page of a pod of which nothing is known any more."""
    return {"head": _Head("", "gone", why)}


def thd_pod_page(view: PodView, node: str, root: str, pod: str, now: float) -> bytes:
    """Return the page. This takes a while: call it in a thread.

    :param root: the way from it to the node's page. :param pod: as it was asked for.
    :param now: seconds since 1970 UTC."""
    made = {id: part.shown(id, now) for id, part in pod_parts(view).items()}
    meant = view.described.pod
    up = tags.a("All pods of ", html.cleaned(node), href=f"{root}#pod-{quote(meant.id, safe='')}", id="up")
    return html.document(
        html.cleaned(f"{meant.namespace}/{meant.name}"),
        root,
        {"data-live": f"{root}live/{quote(pod)}"},
        tags.header(tags.div(tags.p(up), made["head"]), html.controls(now)),
        html.element(
            "main",
            {},
            html.section("Pod and VM", made["facts"]),
            html.section("Timeline", made["timeline"]),
            html.section("Containers", made["containers"]),
            html.section("End of the console", made["console"]),
            html.section("Volumes", made["volumes"], made["mounts"]),
            html.section("Network policies", made["policies"]),
            html.section("Events, the newest first", made["events"]),
        ),
        html.keys(("Esc", "all pods"), ("d", "light, dark")),
    )


# ---- parts


@attrs.frozen
class _Head(Part):
    pod: str
    state: str
    message: str

    def tag(self, now: float | None) -> Tag:
        return tags.div(
            tags.h1(self.pod, " ", html.mark(self.state, good=self.state == "ready")),
            tags.p(self.message, class_="trouble") if self.message else "",
        )


@attrs.frozen
class _Facts(Part):
    entries: Sequence[tuple[str, str]]

    def tag(self, now: float | None) -> Tag:
        return html.facts(self.entries)


@attrs.frozen
class _Table(Part):
    """A table of words. :ivar empty: what is said if it has no rows."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    empty: str

    def tag(self, now: float | None) -> Tag:
        return tags.div(html.rows_or(self.heads, self.rows, self.empty))


@attrs.frozen
class _Console(Part):
    text: str
    why: str  # there is none

    def tag(self, now: float | None) -> Tag:
        if not self.text:
            return tags.div(tags.p(self.why or "Nothing was written to it.", class_="empty"))
        console = html.element("pre", {"tabindex": "0", "role": "region", "aria-label": "console"}, self.text)
        return tags.div(console)

    def cleaned(self) -> Part:
        """Keep more of it than of other texts, and its end."""
        return _Console(html.printable(redacted_end(self.text, MAX_CONSOLE)), html.cleaned(self.why))


@attrs.frozen
class _Step:
    """A step of the timeline. Times are nanoseconds since 1970 UTC; `until` is 0 while it is under way."""

    at: int
    until: int
    container: str
    what: str
    detail: str
    error: str


@attrs.frozen
class _Timeline(Part):
    steps: Sequence[_Step]
    left_out: int

    def tag(self, now: float | None) -> Tag:
        heads = ("Time", "Took", "Of the launch", "Step", "Container", "Detail")
        begin, end = launch_window(self.steps)
        rows = (
            (
                words,
                took(one.at, one.until),
                _bar(one, begin, end) if one.at <= end and one.until != one.at else "",
                one.what,
                one.container,
                tags.span(one.detail, " ", html.mark(one.error, good=False)) if one.error else one.detail,
            )
            for one, words in zip(self.steps, _times([one.at for one in self.steps]), strict=True)
        )
        more = tags.p(f"{self.left_out} steps in between are not kept.") if self.left_out else ""
        return tags.div(html.rows_or(heads, rows, "Nothing since the daemon started."), more)


def launch_window(steps: Sequence[_Step]) -> tuple[int, int]:
    """Return from when to when bars are drawn: from the first step up to a minute in which nothing began."""
    if not steps:
        return 0, 0
    begin = end = steps[0].at
    for step in steps:
        if step.at > end + _GAP:
            break
        end = max(end, step.at, step.until)
    return begin, end


def _bar(step: _Step, begin: int, end: int) -> Tag:
    scale = _WIDTH / max(end - begin, 1)
    left = (step.at - begin) * scale
    width = max(((step.until or end) - step.at) * scale, 1.0)
    kind = "failed" if step.error else "took" if step.until else "under-way"
    rect = html.element("rect", {"x": f"{left:.1f}", "y": "0", "width": f"{width:.1f}"})
    words = {"role": "img", "aria-label": took(step.at, step.until), "preserveAspectRatio": "none"}
    bar = html.element("svg", words, rect(height=str(_HEIGHT), class_=kind))
    return bar(width=str(_WIDTH), height=str(_HEIGHT), viewBox=f"0 0 {_WIDTH} {_HEIGHT}", class_="step")


# ---- words


def moment(nanos: int) -> str:
    """Return a time in words; "": there is none. :param nanos: since 1970 UTC."""
    return f"{datetime.fromtimestamp(nanos / _NANOS, UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3] if nanos else ""


def _times(moments: Sequence[int]) -> Iterable[str]:
    """Yield times in words, each with its date only if that is not the one before's."""
    date = ""
    for words in map(moment, moments):
        yield words.removeprefix(date)
        date = words[:_DATE]


def took(at: int, until: int) -> str:
    """Return how long a step took; "": no time."""
    if not until:
        return "..."
    return f"{(until - at) / _NANOS:.3f} s" if until != at else ""


def _rows(rows: Iterable[Sequence[str]]) -> tuple[Sequence[str], ...]:
    return tuple(rows)[:MAX_ROWS]


def _access(read_only: bool) -> str:
    return "read" if read_only else "read and write"


def _facts(answer: control.DescribePodResponse) -> Iterable[tuple[str, str]]:
    pod, vm, guest = answer.pod, answer.pod.vm, answer.guest
    yield "Sandbox", pod.id
    yield "UID", f"{pod.uid}, attempt {pod.attempt}"
    yield "Created", f"{moment(pod.created_at)} UTC"
    yield "Provider", f"{pod.provider}, handler {pod.handler}" if pod.handler else pod.provider
    yield "VM", f"{vm.id} {vm.state}" if vm.id else ""
    yield "Why", vm.detail
    yield "Size", pod.size
    yield "Cost", f"{vm.cost_per_hour:.4f} USD an hour" if vm.HasField("cost_per_hour") else ""
    yield "Agent", pod.agent if not pod.way else ""
    if answer.HasField("guest"):
        since = guest.finished_at if guest.state in _ENDED else guest.started_at
        yield "Guest", f"{guest.state or 'not known'} since {moment(since)} UTC" if since else guest.state
        yield "Said", "; ".join(each for each in (guest.reason, guest.message, guest.trouble) if each)
        yield "Reached by", "its console alone" if guest.way == "none" else guest.way
        yield from ((f"Not by {each.way}", each.trouble) for each in guest.troubles)
    yield "Addresses", " ".join(pod.addresses)
    yield "Labels", ", ".join(f"{key}={value}" for key, value in sorted(pod.labels.items()))
    for each in pod.refused:
        yield "Refused", f"{each.total:,} packets beyond its share of {each.share}, {each.lately:,} lately"


def _step(step: control.Step) -> _Step:
    return _Step(step.began_at, step.ended_at, step.container, step.what, step.detail, step.error)


_CONTAINERS = ("Container", "Name", "Attempt", "State", "Image", "Started", "Ended", "Exit", "Why")


def _container(one: control.PodContainer) -> Sequence[str]:
    return (
        one.id[: html.SHORT],
        one.name,
        str(one.attempt),
        one.state,
        one.image,
        moment(one.started_at),
        moment(one.finished_at),
        str(one.exit_code) if one.finished_at else "",
        "; ".join(each for each in (one.reason, one.message) if each),
    )


_EVENTS = ("Time", "Sandbox", "Container", "What", "Detail")


def _event(event: control.Event) -> Sequence[str]:
    step = event.step
    words = "; ".join(each for each in (step.detail, step.error) if each)
    return moment(step.began_at), event.pod.sandbox_id[: html.SHORT], step.container, step.what, words


_POLICIES = ("Direction", "Peers", "Ports", "By")


def _policies(view: PodView) -> Iterable[Sequence[str]]:
    pod = view.policies
    if pod is None:
        return
    for name, field in (("receives", "ingress"), ("sends", "egress")):
        by = ", ".join(each.name for each in pod.policies if getattr(each, field))
        if not pod.known:
            yield name, "nothing yet", "", pod.trouble
        elif not pod.HasField(field):
            yield name, "everything", "", ""
        elif not (allowed := getattr(pod, field).allowed):
            yield name, "nothing", "", by
        else:
            for each in allowed:
                more = f" and {each.network_count - 3} more" if each.network_count > 3 else ""
                yield name, ", ".join(each.networks[:3]) + more, ", ".join(each.ports) or "all", by
    if pod.known and not pod.current:
        yield "", "this is not what the policies come to now", "", pod.trouble
