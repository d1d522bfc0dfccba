# SPDX-License-Identifier: Apache-2.0
"""Keys and tokens that end: one of them is shared by all threads, and the next one is there in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import attrs
from twisted.logger import Logger

from infranetes.providers.cloud.interface import CloudError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

# Seconds before its end that a value is renewed; Google's metadata server keeps a token that long.
_EARLY = 300.0
_SPARE = 5.0  # seconds before its end from which a value is no longer used
_PAUSE = 30.0  # seconds between attempts to get the next value while the last one still serves

_log = Logger()


class Lease(Protocol[T_co]):
    """A value for some time. Its methods are called in threads."""

    @property
    def value(self) -> T_co: ...

    def is_due(self) -> bool:
        """Return whether it is time to get the next value."""

    def has_ended(self) -> bool:
        """Return whether the value must no longer be used."""


@attrs.frozen
class TimedLease(Generic[T]):
    """A value that serves for so many seconds. :ivar due, end: of the monotonic clock."""

    value: T = attrs.field(repr=False)
    due: float
    end: float

    @classmethod
    def of(cls, value: T, begun: float, seconds: float) -> TimedLease[T]:
        """Return the lease of a value that was asked for at `begun` and serves for `seconds`."""
        due, end = max(seconds - _EARLY, seconds / 2), max(seconds - _SPARE, seconds * 0.75)
        return cls(value, begun + due, begun + end)

    def is_due(self) -> bool:
        return time.monotonic() > self.due

    def has_ended(self) -> bool:
        return time.monotonic() > self.end


@attrs.frozen
class _Failure:
    error: CloudError
    at: float


class Renewed(Generic[T]):
    """A value that ends, and is renewed.

    While the value serves, the next one is got in a thread of its own, so that this holds up no call.

    :param what: for people. :param get: gets the next value in a thread. It raises `CloudError`.
    """

    def __init__(
        self, what: str, get: Callable[[], Lease[T]], seconds: Callable[[], float] = time.monotonic
    ) -> None:
        self._what = what
        self._get = get
        self._seconds = seconds
        self._lock = threading.Lock()  # held while a value is being fetched
        self._renewing = threading.Lock()  # held while a background thread fetches the next value
        self._lease: Lease[T] | None = None
        self._failure: _Failure | None = None
        self._not_before = 0.0
        self._told = ""

    def _thd_now(self) -> T:
        """Return the current value. :raise CloudError: there is none."""
        lease = self._lease
        if lease is None or lease.has_ended():
            return self._thd_wait()
        if lease.is_due() and self._seconds() >= self._not_before and self._renewing.acquire(blocking=False):
            try:
                threading.Thread(target=self._thd_renew, name=f"infranetes.{self._what}", daemon=True).start()
            except BaseException:
                self._renewing.release()
                raise
        return lease.value

    def _thd_forget(self, value: T) -> None:
        """Drop a value that was refused."""
        with self._lock:
            if self._lease is not None and self._lease.value == value:
                self._lease = None

    def _thd_wait(self) -> T:
        begun = self._seconds()
        with self._lock:
            lease, failure = self._lease, self._failure
            if lease is not None and not lease.has_ended():
                return lease.value
            # The attempt that this thread has waited for failed.
            if failure is not None and failure.at > begun:
                raise _unasked(failure.error)
            try:
                lease = self._lease = self._get()
            except CloudError as error:
                self._failure = _Failure(error, self._seconds())
                raise _unasked(error) from error
            return lease.value

    def _thd_renew(self) -> None:
        try:
            with self._lock:
                self._lease = self._get()
            self._told = ""
        except Exception as error:
            words = str(error) if isinstance(error, CloudError) else type(error).__name__
            if words != self._told:
                _log.warn(
                    "{what} can't be renewed yet, and the old one stays in use: {error}",
                    what=self._what,
                    error=words,
                )
                self._told = words
        finally:
            self._not_before = self._seconds() + _PAUSE
            self._renewing.release()


class RenewedToken(Renewed[str]):
    """A token that is renewed, as libcloud's connections ask for it."""

    @property
    def access_token(self) -> str:
        """The current token. :raise CloudError: there is none; says whether that may pass."""
        return self._thd_now()


def _unasked(error: CloudError) -> CloudError:
    return CloudError(error.kind, str(error), error.retry_after, unasked=True)
