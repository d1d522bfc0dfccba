# SPDX-License-Identifier: Apache-2.0
"""`--watch`: a list that is shown again as it changes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import attrs
from google.protobuf.message import Message

from infranetes.ctl.screen import Screen
from infranetes.ctl.session import Session
from infranetes.ctl.tables import Json
from infranetes_common.concurrency import sleep
from txgrpc import Code, GrpcError

_Answer = TypeVar("_Answer", bound=Message)


@attrs.frozen
class Watched:
    """What changes in an answer's JSON document.

    :ivar entries: the key of a list whose entries have an `id`. :ivar entry: what one of them is called.
    :ivar seconds: between two questions.
    :ivar may_be_partial: while the document has troubles, entries that it does not list may still be there.
    """

    entries: str
    entry: str
    seconds: float = 1.0
    may_be_partial: bool = False


def changes(
    watched: Watched, before: Mapping[str, Json], document: Json
) -> tuple[dict[str, Json], list[Json]]:
    """Return the entries that are there by their ids, and what is new, other or gone since `before`."""
    listed = document[watched.entries]
    assert isinstance(listed, list)
    now: dict[str, Json] = {entry["id"]: entry for entry in listed}
    if watched.may_be_partial and document["troubles"]:
        now = {**before, **now}
    return now, list(_changes(watched, before, now))


def new_troubles(before: Sequence[str], document: Json) -> tuple[Sequence[str], list[Json]]:
    """Return the troubles of `document`, and those that are new since `before`."""
    now = document.get("troubles", [])
    assert isinstance(now, list)
    return now, [{"change": "trouble", "trouble": each} for each in now if each not in before]


def _changes(watched: Watched, before: Mapping[str, Json], now: Mapping[str, Json]) -> Iterator[Json]:
    for id, entry in before.items():
        if id not in now:
            yield {"change": "removed", watched.entry: entry}
    for id, entry in now.items():
        if entry != before.get(id):
            yield {"change": "changed" if id in before else "added", watched.entry: entry}


async def follow(
    session: Session,
    ask: Callable[[], Awaitable[tuple[_Answer, int]]],
    watched: Watched,
    as_json: Callable[[_Answer], Json],
    as_text: Callable[[_Answer], str],
) -> int:
    """Ask again and again, until interrupted. A terminal shows the last answer; anything else gets a line of
    JSON for each entry that has changed, and for each new trouble. A daemon that is restarted meanwhile is
    waited for.

    :raise GrpcError: the first question failed, or the daemon refuses."""
    screen = Screen() if session.on_terminal and not session.options.json else None
    known: dict[str, Json] = {}
    troubles: Sequence[str] = ()
    asked, trouble = False, ""
    while True:
        try:
            answer, _ = await ask()
        except GrpcError as error:
            if not asked or error.code not in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED):
                raise
            trouble = f"the daemon does not answer: {error.message or error.code.name}"
        else:
            asked, trouble = True, ""
            if screen is None:
                document = as_json(answer)
                troubles, said = new_troubles(troubles, document)
                known, changed = changes(watched, known, document)
                for change in (*said, *changed):
                    session.document(change, in_line=True)
            else:
                shown = as_text(answer)
        if screen is not None:
            screen.show(f"{shown}\n{trouble}" if trouble else shown)
        await sleep(session.reactor, watched.seconds)
