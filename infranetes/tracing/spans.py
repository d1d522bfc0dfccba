# SPDX-License-Identifier: Apache-2.0
"""Spans, and which of them is current.

A call's span is made by the `Tracer`; all others are made as children of the current one, so that the code
between a call and its steps does not have to pass a tracer on. The current span is a context variable.
Twisted runs each coroutine in a copy of the context in which it was started, so a span is current in
everything that was started within it, wherever that is resumed.

Work may outlive the span in which it was started. It then belongs to the nearest enclosing span that has not
ended: a launch that outlives its call has a span of its own. Where every enclosing span has ended, as in the
loops that keep a VM informed for the rest of its life, there is no current span and none is made: the trace
is over.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import attrs
from twisted.internet.defer import CancelledError

from infranetes_common import errors
from infranetes_common.trace_context import TraceContext
from txgrpc import Code

Attributes = Mapping[str, str | int | float | bool]

SYSTEM = "rpc.system"  # the attribute that marks the span of an RPC


class Kind(enum.Enum):
    """The side of a call that a span is of; INTERNAL: it is not the span of a call."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"


class Span(Protocol):
    """A piece of work with a beginning and an end, as a trace shows it."""

    @property
    def context(self) -> TraceContext:
        """The context that servers called on its behalf receive."""

    def child(self, name: str, kind: Kind = Kind.INTERNAL, attributes: Attributes | None = None) -> Span:
        """Begin a span that is a part of this one."""

    def add(self, attributes: Attributes) -> None:
        """Add attributes."""

    def end(self, code: Code) -> None:
        """End it, once. :param code: how it ended."""


class Tracer(Protocol):
    """Makes the spans of incoming calls."""

    def call(self, name: str, parent: TraceContext | None, attributes: Attributes) -> Span | None:
        """Begin the span of a call.

        :param parent: the caller's span. :return: None: no span is to be current in the call."""

    async def stop(self) -> None:
        """Deliver the spans that wait, for a limited time, and end."""


@attrs.frozen
class PassedOn:
    """The caller's span, which stands in for our own where nothing is recorded."""

    context: TraceContext

    def child(self, name: str, kind: Kind = Kind.INTERNAL, attributes: Attributes | None = None) -> Span:
        return self

    def add(self, attributes: Attributes) -> None:
        pass

    def end(self, code: Code) -> None:
        pass


class NullTracer:
    """Records nothing. Agents are told the span of the daemon's caller."""

    def call(self, name: str, parent: TraceContext | None, attributes: Attributes) -> Span | None:
        return PassedOn(parent) if parent is not None else None

    async def stop(self) -> None:
        pass


@attrs.define(eq=False)
class _Active:
    """A span in whose context work runs. :ivar span: None once it has ended."""

    span: Span | None
    around: _Active | None


_active: ContextVar[_Active | None] = ContextVar("span", default=None)


def current() -> Span | None:
    """Return the innermost span that this code runs in and that has not ended; None: there is none."""
    active = _active.get()
    while active is not None and active.span is None:
        active = active.around
    return active.span if active is not None else None


@contextmanager
def within_span(span: Span) -> Iterator[Span]:
    """Make `span` current for the block and for what is started in it, and end it with the block."""
    around = _active.get()
    active = _Active(span, around)
    _active.set(active)
    code = Code.OK
    try:
        yield span
    except BaseException as error:
        code = code_of(error)
        raise
    finally:
        active.span = None
        _active.set(around)
        span.end(code)


@contextmanager
def step(name: str, kind: Kind = Kind.INTERNAL, attributes: Attributes | None = None) -> Iterator[None]:
    """Make the block a part of the current span; without one nothing is made."""
    span = current()
    if span is None:
        yield
        return
    with within_span(span.child(name, kind, attributes)):
        yield


@contextmanager
def on_its_own() -> Iterator[None]:
    """Keep the block, and what is started in it, out of the current span, which is merely its occasion."""
    around = _active.get()
    _active.set(None)
    try:
        yield
    finally:
        _active.set(around)


def note(attributes: Attributes) -> None:
    """Add attributes to the current span, if there is one."""
    span = current()
    if span is not None:
        span.add(attributes)


def code_of(error: BaseException) -> Code:
    """Return the status of work that raised `error`."""
    if isinstance(error, CancelledError):
        return Code.CANCELLED
    return errors.code_of(error)
