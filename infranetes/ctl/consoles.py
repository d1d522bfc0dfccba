# SPDX-License-Identifier: Apache-2.0
"""`infranetes-ctl console`: what a pod's VM has written to its console, and what it writes next."""

from __future__ import annotations

from infranetes.ctl import calls, render
from infranetes.ctl.session import DONE, Session
from infranetes_common.concurrency import sleep
from infranetes_common.wire import control
from txgrpc import Code, GrpcError

PAUSE_SECONDS = 1.0
OVERLAP = 4096  # the last characters shown, which are searched for to find where the new part begins


async def console(session: Session) -> int:
    """Print the console; with --follow, go on with what is written until the VM is gone.

    :raise GrpcError: the daemon refuses, or does not answer at first."""
    answer, _ = await calls.console(session.stub, session.options)
    if session.options.follow:
        return await _follow(session, answer)
    if session.options.json:
        session.document(render.as_json("console", answer, session.options))
    else:
        session.print(render.as_text("console", answer, session.options))
    return DONE


async def _follow(session: Session, answer: control.GetConsoleResponse) -> int:
    vm_id, shown = "", ""
    while True:
        if answer.vm_id != vm_id:
            vm_id, shown = answer.vm_id, ""
            if not session.options.json:
                session.print(f"---- VM {vm_id} of sandbox {answer.sandbox_id}")
        if more := news(shown, answer.text):
            _tell(session, vm_id, more)
            shown = answer.text
        if answer.ended_at:
            return _end(session, answer)
        await sleep(session.reactor, PAUSE_SECONDS)
        answer = await _ask_again(session, answer)


async def _ask_again(session: Session, before: control.GetConsoleResponse) -> control.GetConsoleResponse:
    """Ask for the console. While the daemon is restarted, the console is taken to be as it was."""
    try:
        answer, _ = await calls.console(session.stub, session.options)
    except GrpcError as error:
        if error.code not in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED):
            raise
        return before
    return answer


def news(shown: str, now: str) -> str:
    """Return the part of `now` that comes after `shown`. Both are ends of one console."""
    if now.startswith(shown):
        return now[len(shown) :]
    last = shown[-OVERLAP:]
    _, found, after = now.rpartition(last)
    return after if found else now


def _tell(session: Session, vm_id: str, text: str) -> None:
    if session.options.json:
        session.document({"vm_id": vm_id, "text": text}, in_line=True)
    else:
        session.write(text)


def _end(session: Session, answer: control.GetConsoleResponse) -> int:
    if session.options.json:
        ended = {"vm_id": answer.vm_id, "ended_at": answer.ended_at / 1e9, "detail": answer.detail}
        session.document(ended, in_line=True)
    else:
        session.print(f"\n---- the VM is removed{': ' if answer.detail else ''}{answer.detail}")
    return DONE
