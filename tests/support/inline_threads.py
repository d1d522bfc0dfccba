# SPDX-License-Identifier: Apache-2.0
"""A virtual clock whose threads do their work at once, where it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from twisted.internet.task import Clock
from twisted.python.failure import Failure

from infranetes_common.reactors import IReactor


class _Pool:
    """Stands in for a thread pool."""

    def callInThreadWithCallback(
        self, done: Any, work: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> None:
        """Do the work now. Any: as Twisted's own."""
        try:
            result = work(*args, **kwargs)
        except Exception:
            done(False, Failure())
        else:
            done(True, result)


class InlineThreads(Clock):  # type: ignore[misc]
    """A clock that code with small blocking work can be tested with, one step after the other."""

    def getThreadPool(self) -> Any:
        """Return what does its work at once. Any: it is no real pool."""
        return _Pool()

    def callFromThread(self, call: Callable[..., None], *args: object, **kwargs: object) -> None:
        """Call it now."""
        call(*args, **kwargs)

    @property
    def reactor(self) -> IReactor:
        """This object, typed as a whole reactor."""
        return cast(IReactor, self)
