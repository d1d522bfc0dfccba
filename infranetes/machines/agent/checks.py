# SPDX-License-Identifier: Apache-2.0
"""Checks of an agent's messages, made before anything else on the node sees them.

Texts are cut to their lengths, numbers to their ranges (`limits`), and unknown fields are dropped; values
that can't be cut, such as ids, are refused. So no figure, message or time of one VM can spoil an answer about
another VM, or be invalid for kubelet.
"""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator, Callable, MutableMapping
from functools import lru_cache
from typing import Any, Generic, TypeVar

import attrs
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from twisted.logger import Logger

from infranetes.machines.agent import limits
from infranetes_common import cri_log
from infranetes_common.errors import InfranetesError, InvalidArgument
from infranetes_common.wire import cri, vmserver
from infranetes_common.wire.descriptors import is_repeated
from txgrpc import Code, GrpcError, StreamCall
from txgrpc.turns import Turns

_ID = re.compile(r"[0-9a-z-]{1,64}")
_TEXTUAL = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
_REAL = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)

_Message = TypeVar("_Message", bound=Message)
_Request = TypeVar("_Request", bound=Message)

_log = Logger()


# ---- messages


@attrs.frozen
class _Rule:
    """The limits of a field.

    :ivar most: how many values a repeated field may have. :ivar length: the longest text, in characters.
    :ivar low: the smallest number. :ivar high: the largest number.
    """

    most: int
    length: int
    low: int
    high: int
    real: bool
    message: bool
    map: bool


@lru_cache(maxsize=1024)
def _rule(field: FieldDescriptor) -> _Rule:
    name, inner = field.full_name, field.message_type
    repeated = is_repeated(field)
    low, high = limits.RANGES.get(name, limits.RANGE)
    if name.endswith(("_nanos", "_at")) and field.type == FieldDescriptor.TYPE_INT64:
        high = limits.LATEST
    return _Rule(
        most=limits.COUNTS[name] if repeated else 0,
        length=limits.TEXTS.get(name, limits.TEXT) if field.type in _TEXTUAL else 0,
        low=low,
        high=high,
        real=field.type in _REAL,
        message=inner is not None,
        map=inner is not None and bool(inner.GetOptions().map_entry),
    )


def clamped(message: _Message) -> _Message:
    """Clamp `message`, in place, to `limits`, and return it."""
    message.DiscardUnknownFields()
    _clamp(message)
    return message


def _clamp(message: Message) -> None:
    for field, value in message.ListFields():
        rule = _rule(field)
        if rule.map and field.message_type is not None:
            _clamp_map(field.message_type, value, rule.most)
        elif rule.most:
            del value[rule.most :]
            for index, element in enumerate(value):
                if rule.message:
                    _clamp(element)
                elif (fit := _fit(rule, element)) != element:
                    value[index] = fit
        elif rule.message:
            _clamp(value)
        else:
            fit = _fit(rule, value)
            if fit is not value:
                setattr(message, field.name, fit)


def _fit(rule: _Rule, value: Any) -> Any:  # Any: the type of a field's value depends on the field
    if rule.length:
        return value[: rule.length]
    if rule.real:
        return min(max(value, 0.0), 100.0) if math.isfinite(value) else 0.0
    if rule.low <= value <= rule.high:
        return value
    return min(max(value, rule.low), rule.high)


def _clamp_map(entry: Descriptor, values: MutableMapping[str, str], most: int) -> None:
    """Remove entries that are too long or too many. Entries are not cut: half a key is another key."""
    key, value = (limits.TEXTS[entry.fields_by_name[name].full_name] for name in ("key", "value"))
    kept = [name for name in sorted(values) if len(name) <= key and len(values[name]) <= value][:most]
    for name in set(values) - set(kept):
        del values[name]


# ---- answers


def checked_id(id: str) -> str:
    """Return `id`, if it can be a container's. :raise InvalidArgument: it can't be one."""
    if not _ID.fullmatch(id):
        raise InvalidArgument(f"its agent reported a container {id[:64]!r}, which is not a valid id")
    return id


def checked_state(id: str, state: vmserver.ContainerState) -> vmserver.ContainerState:
    """Return the clamped state of container `id`. :raise InvalidArgument: it is another container's."""
    if state.id != id:
        raise InvalidArgument(
            f"its agent was asked about container {id} and answered about {state.id[:64]!r}"
        )
    return clamped(state)


def checked_held(answer: vmserver.HoldResponse) -> list[str]:
    """Return the ids of held containers. :raise InvalidArgument: one is invalid, or there twice."""
    ids = [checked_id(id) for id in answer.containers]
    if len(set(ids)) != len(ids):
        raise InvalidArgument("its agent reported a container that it holds twice")
    return ids


def checked_adopted(id: str, state: vmserver.ContainerState) -> vmserver.ContainerState:
    """Return the clamped state of a container that was adopted as `id`.

    :raise InvalidArgument: it is another container's, or one that is not CREATED or later."""
    state = checked_state(id, state)
    if state.state not in (cri.CONTAINER_CREATED, cri.CONTAINER_RUNNING, cri.CONTAINER_EXITED):
        raise InvalidArgument(f"its agent reported an adopted container {id} in the state {state.state}")
    return state


def checked_event(event: vmserver.WatchEvent) -> vmserver.WatchEvent:
    """Return the clamped event of the Watch stream. :raise InvalidArgument: its container's id is invalid."""
    kind = event.WhichOneof("event")
    if kind == "container":
        checked_id(event.container.id)
    elif kind == "removed":
        checked_id(event.removed)
    return clamped(event)


async def checked_stats(answer: vmserver.StatsResponse, turns: Turns) -> vmserver.StatsResponse:
    """Return the clamped answer, giving other work turns of the reactor meanwhile."""
    answer.DiscardUnknownFields()
    for part in (answer.machine, *answer.cards, *answer.containers):
        resting = turns.rest()
        if resting is not None:
            await resting
        _clamp(part)
    return answer


def checked_output(response: vmserver.ExecSyncResponse, most: int) -> vmserver.ExecSyncResponse:
    """Return a command's output, with each stream cut to `most` bytes."""
    stdout, stderr = response.stdout, response.stderr  # each look makes a copy, of up to 16 MiB
    if len(stdout) > most or len(stderr) > most:
        return vmserver.ExecSyncResponse(
            stdout=stdout[:most], stderr=stderr[:most], exit_code=response.exit_code
        )
    response.DiscardUnknownFields()
    return response


class CheckedRecords:
    """The log records of one call, each brought within its limits.

    That lines are too long, or damaged, is logged once for the call.
    """

    def __init__(self, container_id: str) -> None:
        self._container = container_id
        self._cut = False
        self._damaged = False

    def checked(self, record: vmserver.LogRecord) -> vmserver.LogRecord:
        """Return the record within its limits. :raise InfranetesError: its cursor is too long."""
        if len(record.cursor) > limits.CURSOR:
            raise InfranetesError(f"its agent sent a cursor of over {limits.CURSOR} characters")
        if len(record.line) > limits.LINE_BYTES:
            record.line = record.line[: limits.LINE_BYTES]
            if not self._cut:
                self._cut = True
                _log.warn(
                    "the agent of container {container} sends lines of over {most} bytes: they are cut",
                    container=self._container,
                    most=limits.LINE_BYTES,
                )
        if record.time_nanos < 0:
            record.time_nanos = 0
        if record.HasField("text"):
            record.text, whole = cri_log.checked(record.text)
            if not whole:
                record.gap = True
                if not self._damaged:
                    self._damaged = True
                    _log.warn(
                        "the agent of container {container} sends damaged lines: they are left out",
                        container=self._container,
                    )
        return record


# ---- streams and errors


class CheckedStream(Generic[_Message]):
    """A stream whose messages are checked one by one. Its only error is GrpcError.

    :param check: returns the checked message, or raises InvalidArgument to refuse it, which ends the call.
    """

    def __init__(self, call: StreamCall[_Request, _Message], check: Callable[[_Message], _Message]) -> None:
        self._messages = aiter(call)
        self._cancel = call.cancel
        self._check = check

    def cancel(self) -> None:
        """End the call. Idempotent."""
        self._cancel()

    def __aiter__(self) -> AsyncIterator[_Message]:
        return self

    async def __anext__(self) -> _Message:
        try:
            return self._check(await anext(self._messages))
        except GrpcError as error:
            raise shortened(error) from None
        except InvalidArgument as error:
            self._cancel()
            raise GrpcError(Code.INVALID_ARGUMENT, str(error)) from None


def shortened(error: GrpcError) -> GrpcError:
    """Return `error` with its message cut to `limits.ERROR_TEXT` characters."""
    if len(error.message) <= limits.ERROR_TEXT:
        return error
    return GrpcError(error.code, error.message[: limits.ERROR_TEXT] + "…")
