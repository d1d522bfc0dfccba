# SPDX-License-Identifier: Apache-2.0
"""Passes that are made again and again, whatever becomes of one of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from twisted.internet.defer import CancelledError
from twisted.logger import Logger, LogLevel

from infranetes.providers.cloud.calls.translate import to_infranetes_error
from infranetes.providers.cloud.interface import CloudError

_log = Logger()


@contextmanager
def one_pass(location: str, what: str, level: LogLevel = LogLevel.warn) -> Iterator[None]:
    """Log the error with which a pass ends, so that the next one is made all the same.

    :param location: the cloud's, `Cloud.location`. :param what: is done in the pass, for people.
    :param level: of errors of the cloud's; others are logged with their tracebacks."""
    try:
        yield
    except CloudError as error:
        _log.emit(level, "{error}", error=to_infranetes_error(location, error))
    except CancelledError:
        raise
    except Exception:
        _log.failure("{cloud}: {what} failed", cloud=location, what=what)
