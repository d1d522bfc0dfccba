# SPDX-License-Identifier: Apache-2.0
"""The daemons' logs: one line per event, as text or JSON.

Code logs with ``twisted.logger.Logger`` and passes `FIELDS` by name. Only these are written beside the
message, so nothing else that an event holds gets into the log. What looks like a secret in a message or a
traceback is replaced by "(hidden)". Lines for systemd's journal begin with their priority, which it takes
off.
"""

from __future__ import annotations

import json
import os
import re
import string
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal, TextIO, cast, get_args

from twisted.application.service import IServiceCollection, MultiService
from twisted.logger import (
    FileLogObserver,
    FilteringLogObserver,
    ILogObserver,
    InvalidLogLevelError,
    LogEvent,
    LogLevel,
    LogLevelFilterPredicate,
    formatEvent,
    globalLogBeginner,
)
from twisted.python.components import Componentized
from twisted.python.log import ILogObserver as ILegacyLogObserver
from twisted.python.logfile import LogFile
from zope.interface import implementer

from infranetes_common.errors import ConfigError
from infranetes_common.redaction import redacted, redacted_beginning, redacted_end

Format = Literal["text", "json"]

FIELDS = (
    "sandbox",
    "container",
    "pod",
    "vm",
    "provider",
    "image",
    "seconds",
    "uid",
    "pid",
    "login",
    "exit_code",
)

# Characters of a message, a field or a traceback: a peer may have sent part of it, and hiding secrets takes
# time.
MAX_TEXT = 16 * 1024

LOG_FILE_BYTES = 1024 * 1024

# Source: systemd.exec(5), SyslogLevelPrefix=, and sd-daemon(3)
_PRIORITIES = {"debug": 7, "info": 6, "warn": 4, "error": 3, "critical": 2}


def observer(format: str = "text", level: str = "info", stream: TextIO | None = None) -> ILogObserver:
    """Return an observer that writes events of `level` and above to `stream`, by default standard output.

    :raise ConfigError: no such format or level.
    """
    if format not in get_args(Format):
        raise ConfigError(f"log format {format!r} is not known; known are {', '.join(get_args(Format))}")
    try:
        least = LogLevel.levelWithName(level)
    except InvalidLogLevelError:
        known = ", ".join(constant.name for constant in LogLevel.iterconstants())
        raise ConfigError(f"log level {level!r} is not known; known are {known}") from None
    formats: dict[str, Callable[[LogEvent], str | None]] = {"text": format_text, "json": format_json}
    output = sys.stdout if stream is None else stream
    formatted = formats[format]
    file = FileLogObserver(output, with_priority(formatted) if is_journal(output) else formatted)
    predicate = LogLevelFilterPredicate(defaultLogLevel=least)
    if least is LogLevel.info:
        # Twisted's transports log each start and stop ("_ServerFactory starting on ...") in this namespace.
        # Errors logged in it have the level critical.
        predicate.setLogLevelForNamespace("log_legacy", LogLevel.warn)
    return FilteringLogObserver(file, [predicate])


def is_journal(stream: TextIO) -> bool:
    """Return whether `stream` is connected to systemd's journal."""
    try:
        status = os.fstat(stream.fileno())
    except (AttributeError, OSError, ValueError):  # without a descriptor, or closed
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def with_priority(formatted: Callable[[LogEvent], str | None]) -> Callable[[LogEvent], str]:
    """Return a format whose lines begin with what the journal takes as their priority."""

    def format(event: LogEvent) -> str:
        prefix = f"<{_PRIORITIES[_level(event)]}>"
        return "".join(prefix + line for line in (formatted(event) or "").splitlines(keepends=True))

    return format


def file_output(path: str) -> TextIO:
    """Return a stream to a log file of LOG_FILE_BYTES at most; the file before it is kept as `PATH.1`.

    :raise ConfigError: it can't be written.
    """
    name, directory = os.path.basename(path), os.path.dirname(path)
    try:
        opened = LogFile(name, directory, LOG_FILE_BYTES, defaultMode=0o600, maxRotatedFiles=1)
    except OSError as error:
        raise ConfigError(f"log file {path}: {error.strerror}") from None
    return cast("TextIO", opened)  # it has write and flush, which is all that an observer uses


def start(format: str = "text", level: str = "info", stream: TextIO | None = None) -> None:
    """Begin to log, in a process that twistd does not run. Call it once per process."""
    globalLogBeginner.beginLoggingTo([observer(format, level, stream)], redirectStandardIO=False)


@implementer(ILogObserver)
class LogOutput:
    """An observer whose format and level may be changed while it is in use; see `observer`.

    :raise ConfigError: no such format or level.
    """

    def __init__(self, format: str = "text", level: str = "info") -> None:
        self._stream = sys.stdout  # bound now: once twistd logs, writing to sys.stdout makes events
        self._observer = observer(format, level, self._stream)

    def change(self, format: str, level: str) -> None:
        """Write in this format, from this level on.

        :raise ConfigError: no such format or level; nothing is changed.
        """
        self._observer = observer(format, level, self._stream)

    def __call__(self, event: LogEvent) -> None:
        self._observer(event)


class LoggedService(MultiService):
    """A daemon's outermost service: twistd logs to its observer, unless ``--logger`` names another."""

    def __init__(self, log_observer: ILogObserver) -> None:
        MultiService.__init__(self)
        self.log_observer = log_observer

    def setServiceParent(self, parent: IServiceCollection) -> None:
        if isinstance(parent, Componentized):  # the application, which twistd asks for this component
            parent.setComponent(ILegacyLogObserver, self.log_observer)  # type: ignore[no-untyped-call]
        MultiService.setServiceParent(self, parent)


# -- one event


def format_text(event: LogEvent) -> str:
    """Format as ``2026-03-01T12:00:00.123Z info namespace: message field=value``; tracebacks are indented."""
    in_message = _names(event)
    extra = "".join(
        f" {name}={_quoted(value)}" for name, value in _fields(event).items() if name not in in_message
    )
    line = f"{_time(event)} {_level(event)} {event.get('log_namespace') or '-'}: {_message(event)}{extra}\n"
    trace = _traceback(event)
    return line + "".join(f"    {_printable(each)}\n" for each in trace.splitlines())


def format_json(event: LogEvent) -> str:
    """Format as one JSON object: time, level, namespace, message, the fields, traceback."""
    found: dict[str, object] = {
        "time": _time(event),
        "level": _level(event),
        "namespace": event.get("log_namespace") or "-",
        "message": _message(event),
        **_fields(event),
    }
    trace = _traceback(event)
    if trace:
        found["traceback"] = trace
    return json.dumps(found) + "\n"


def _time(event: LogEvent) -> str:
    when = datetime.fromtimestamp(event.get("log_time") or 0.0, UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _level(event: LogEvent) -> str:
    level = event.get("log_level")
    return "info" if level is None else str(level.name)


def message(event: LogEvent) -> str:
    """Return an event's message without secrets. Of a message over MAX_TEXT characters the end is dropped."""
    text = formatEvent(event)
    return redacted(text) if len(text) <= MAX_TEXT else f"{redacted_beginning(text, MAX_TEXT)} …"


def _message(event: LogEvent) -> str:
    """Return the message in one line, with control characters escaped."""
    return _printable(message(event))


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text.strip("\n"))


def _names(event: LogEvent) -> set[str]:
    """Return the fields that the message itself shows."""
    try:
        parsed = list(string.Formatter().parse(event.get("log_format") or ""))
    except ValueError:
        return set()
    return {re.split(r"[.\[(]", name, maxsplit=1)[0] for _text, name, _spec, _conversion in parsed if name}


def _fields(event: LogEvent) -> dict[str, object]:
    found: dict[str, object] = {}
    for name in FIELDS:
        value = event.get(name)
        if isinstance(value, bool | int):
            found[name] = value
        elif isinstance(value, float):
            found[name] = round(value, 3)
        elif value is not None and value != "":
            found[name] = redacted_beginning(_safe_str(value), MAX_TEXT)
    return found


def _safe_str(value: object) -> str:
    try:
        return str(value)
    except Exception as error:
        return f"(no text: {type(error).__name__})"


def _quoted(value: object) -> str:
    text = _printable(str(value))
    return text if re.fullmatch(r"[^\s\"=]+", text) else json.dumps(text, ensure_ascii=False)


def _traceback(event: LogEvent) -> str:
    """Return the failure's traceback without secrets. Of a long one the end is kept: it names the error."""
    failure = event.get("log_failure")
    return "" if failure is None else redacted_end(failure.getTraceback(), MAX_TEXT)
