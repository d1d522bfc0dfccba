"""Whose calls these are.

Keys in the configuration, or else what botocore finds: environment, configuration files, SSO, the role
of the instance or container that the node is. That chain, with its renewals, is botocore's and not
libcloud's, which takes keys and nothing else.
"""

from __future__ import annotations

import threading
from typing import Any

import attrs

from infranetes.providers.cloud.interface import CloudError, Trouble


@attrs.frozen
class Keys:
    """What a request is signed with."""

    access_key: str
    secret_key: str = attrs.field(repr=False)
    token: str | None = attrs.field(default=None, repr=False)


class Credentials:
    """The keys of now. Methods are called in threads."""

    def __init__(self, access_key: str, secret_key: str, profile: str) -> None:
        self._given = Keys(access_key, secret_key) if access_key else None
        self._profile = profile
        self._lock = threading.Lock()
        self._found: Any = None

    def _thd_now(self) -> Keys:
        """:raise CloudError: there are none."""
        if self._given is not None:
            return self._given
        with self._lock:
            if self._found is None:
                self._found = self._thd_find()
            frozen = self._found.get_frozen_credentials()
        return Keys(frozen.access_key, frozen.secret_key, frozen.token)

    def _thd_find(self) -> Any:
        try:
            from botocore.session import Session
        except ImportError:
            raise CloudError(
                Trouble.CREDENTIALS,
                "neither access_key and secret_key are configured nor is python3-botocore installed, "
                "which finds credentials elsewhere",
            ) from None
        found = Session(profile=self._profile or None).get_credentials()
        if found is None:
            raise CloudError(
                Trouble.CREDENTIALS,
                "no credentials: neither keys in the configuration, nor in the environment, in AWS' "
                "files, or by an instance's role",
            )
        return found
