# SPDX-License-Identifier: Apache-2.0
"""The credentials of calls to AWS.

Keys of the configuration, or else what botocore finds: the environment, configuration files, SSO, the role of
the instance or container that the node is. libcloud takes keys only, so that chain with its renewals is
botocore's.
"""

from __future__ import annotations

import threading
from typing import Protocol

import attrs

from infranetes.providers.cloud.interface import CloudError, ErrorKind


@attrs.frozen
class Keys:
    """The keys that requests are signed with."""

    access_key: str
    secret_key: str = attrs.field(repr=False)
    token: str | None = attrs.field(default=None, repr=False)


class _FrozenKeys(Protocol):
    """botocore's keys at one moment."""

    access_key: str
    secret_key: str
    token: str | None


class _BotocoreCredentials(Protocol):
    """What is used of botocore's credentials, for botocore has no types."""

    def get_frozen_credentials(self) -> _FrozenKeys: ...


class Credentials:
    """Gives the current keys. Methods are called in threads."""

    def __init__(self, access_key: str, secret_key: str, profile: str) -> None:
        self._given = Keys(access_key, secret_key) if access_key else None
        self._profile = profile
        self._lock = threading.Lock()
        self._found: _BotocoreCredentials | None = None

    def _thd_now(self) -> Keys:
        """Return the current keys. :raise CloudError: there are none."""
        if self._given is not None:
            return self._given
        with self._lock:
            if self._found is None:
                self._found = self._thd_find()
            frozen = self._found.get_frozen_credentials()
        return Keys(frozen.access_key, frozen.secret_key, frozen.token)

    def _thd_find(self) -> _BotocoreCredentials:
        try:
            from botocore.session import Session
        except ImportError:
            raise CloudError(
                ErrorKind.CREDENTIALS,
                "neither access_key and secret_key are configured nor is python3-botocore installed, "
                "which finds credentials elsewhere",
            ) from None
        found: _BotocoreCredentials | None = Session(profile=self._profile or None).get_credentials()
        if found is None:
            raise CloudError(
                ErrorKind.CREDENTIALS,
                "no credentials: neither keys in the configuration, nor in the environment, in AWS' "
                "files, or by an instance's role",
            )
        return found
