# SPDX-License-Identifier: Apache-2.0
"""Spans, and which of them is current.

A call's span is made by the `Tracer`; all others are made within the one that is current, so that nothing
between a call and its steps has to hand a tracer on. The current span is a context variable. Twisted has each
coroutine run in a copy of the context of who started it, so a span is current in all that was started within
it, wherever that is resumed.

Work may outlive the span that it was started in. It belongs to the nearest span around that which goes on: a
launch that outlives its call has its own. Where none does, such as in the loops that keep a VM informed for
the rest of its life, none is current and none is made: a trace ends.
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

SYSTEM = "rpc.system"  # of a call of gRPC: the attribute that makes its span one


class Kind(enum.Enum):
    """Which side of a call a span is, if it is one."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"


class Span(Protocol):
    """Something that takes time."""

    @property
    def context(self) -> TraceContext:
        """What is told to those who are called on its behalf."""

    def child(self, name: str, kind: Kind = Kind.INTERNAL, attributes: Attributes | None = None) -> Span:
        """Begin a part of it."""

    def add(self, attributes: Attributes) -> None:
        """Say more of it."""

    def end(self, code: Code) -> None:
        """End it, once. :param code: how it ended."""


class Tracer(Protocol):
    """Makes the spans of calls that come in."""

    def call(self, name: str, parent: TraceContext | None, attributes: Attributes) -> Span | None:
        """Begin the span of a call.

        :param parent: the caller's. :return: None: there is nothing to follow."""

    async def stop(self) -> None:
        """Deliver what there is, for a moment, and no more."""


@attrs.frozen
class PassedOn:
    """The caller's span, in the place of our own where those are not recorded."""

    context: TraceContext

    def child(self, name: str, kind: Kind = Kind.INTERNAL, attributes: Attributes | None = None) -> Span:
        return self

    def add(self, attributes: Attributes) -> None:
        pass

    def end(self, code: Code) -> None:
        pass


class NullTracer:
    """Records nothing: agents are told the span of the daemon's own caller."""

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
    """The innermost span that this work belongs to and that has not ended; None: there is none."""
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
    """Time the block as a part of the current span. There is none: nothing is made."""
    span = current()
    if span is None:
        yield
        return
    with within_span(span.child(name, kind, attributes)):
        yield


@contextmanager
def on_its_own() -> Iterator[None]:
    """Have the block, and what is started in it, belong to no span: a call gave the occasion for it only."""
    around = _active.get()
    _active.set(None)
    try:
        yield
    finally:
        _active.set(around)


def note(attributes: Attributes) -> None:
    """Say more of the current span, if there is one."""
    span = current()
    if span is not None:
        span.add(attributes)


def code_of(error: BaseException) -> Code:
    """How work ended that raised `error`."""
    if isinstance(error, CancelledError):
        return Code.CANCELLED
    return errors.to_grpc(error).code
