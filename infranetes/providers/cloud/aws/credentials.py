# SPDX-License-Identifier: Apache-2.0
"""The credentials of calls to AWS.

Keys of the configuration, or else what botocore finds as AWS' own tools do: the environment, AWS' files with
their roles, SSO and processes, a web identity, the role of the container or instance that the node is.
libcloud takes keys only, so that chain with its renewals is botocore's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

import attrs

from infranetes.providers.cloud.aws.credential_errors import broken, classify
from infranetes.providers.cloud.calls.renewal import Renewed
from infranetes.providers.cloud.interface import CloudError, ErrorKind

_LOOK_AGAIN = 60.0  # seconds until keys without an expiry are looked up again, as they may have been replaced
_SPARE = 5.0  # seconds before their expiry from which keys are no longer used
_CONNECT_SECONDS = 3.0
_METADATA_ATTEMPTS = 3
_VENDOR = Path("/sys/class/dmi/id/sys_vendor")
_MOST_PROFILES = 10  # in a chain of source_profile references


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
    """The part of botocore's credentials that is used here, typed because botocore has no types."""

    def get_frozen_credentials(self) -> _FrozenKeys: ...


@runtime_checkable
class _Refreshable(Protocol):
    """Credentials of botocore that expire."""

    def refresh_needed(self, refresh_in: float | None = None) -> bool: ...


class _Session(Protocol):
    """The part of botocore's session that is used here."""

    full_config: Mapping[str, Mapping[str, Mapping[str, str]]]

    def get_config_variable(self, name: str) -> str | int | None: ...
    def set_config_variable(self, name: str, value: str | int) -> None: ...
    def set_default_client_config(self, config: object) -> None: ...
    def get_credentials(self) -> _BotocoreCredentials | None: ...


@attrs.frozen
class _Lease:
    """Keys, and the source of their expiry."""

    value: Keys
    credentials: _BotocoreCredentials = attrs.field(repr=False)
    at: float  # when they were found, by the monotonic clock

    def is_due(self) -> bool:
        if isinstance(self.credentials, _Refreshable):
            return self.credentials.refresh_needed()
        return time.monotonic() > self.at + _LOOK_AGAIN

    def has_ended(self) -> bool:
        return isinstance(self.credentials, _Refreshable) and self.credentials.refresh_needed(_SPARE)


class Credentials:
    """Gives the current keys. Methods are called in threads.

    :param access_key: of the configuration; "": botocore finds others. :param profile: of AWS' files.
    :param region: whose STS is asked. :param timeout: seconds in which keys are found, or are not.
    :param vendor_file: the file that names this machine's vendor.
    """

    def __init__(
        self,
        access_key: str,
        secret_key: str,
        profile: str,
        region: str,
        timeout: float = 30.0,
        vendor_file: Path = _VENDOR,
    ) -> None:
        self._given = Keys(access_key, secret_key) if access_key else None
        self._profile = profile
        self._region = region
        self._timeout = timeout
        self._vendor_file = vendor_file
        self._found: _BotocoreCredentials | None = None
        self._keys = Renewed("AWS credentials", self._thd_get)

    def _thd_now(self) -> Keys:
        """Return the current keys. :raise CloudError: there are none; says whether that may pass."""
        return self._given or self._keys._thd_now()

    def _thd_get(self) -> _Lease:
        """Find keys, or renew those that were found before if they expire."""
        at = time.monotonic()
        try:
            if not isinstance(self._found, _Refreshable):
                self._found = self._thd_find()
            frozen = self._found.get_frozen_credentials()
        except Exception as error:
            cloud_error = classify(error)
            if cloud_error.kind is not ErrorKind.TRANSIENT:
                self._found = None  # the repair may be in AWS' files, which are then read anew
            raise cloud_error from error
        return _Lease(Keys(frozen.access_key, frozen.secret_key, frozen.token), self._found, at)

    def _thd_find(self) -> _BotocoreCredentials:
        session = self._session()
        if self._wants_code(session):
            raise broken(
                "the profile asks for the code of an MFA device, for which a daemon can't ask anybody: give "
                "it a role without mfa_serial"
            )
        found = session.get_credentials()
        if found is not None:
            return found
        if self._is_instance():
            # botocore also finds nothing if the metadata service does not answer.
            raise CloudError(
                ErrorKind.TRANSIENT,
                "no credentials: the metadata service of this instance gives none; give the instance a role, "
                "unless it has one",
            )
        raise broken(
            "neither keys in the configuration, nor in the environment, in AWS' files, or by a role of this "
            "instance"
        )

    def _session(self) -> _Session:
        try:
            from botocore.config import Config
            from botocore.session import Session
        except ImportError:
            raise broken(
                "neither access_key and secret_key are configured nor is botocore installed, which finds "
                "credentials elsewhere: apt-get install python3-botocore, or pip install 'infranetes[aws]'"
            ) from None
        make: Callable[..., _Session] = Session
        session = make(profile=self._profile or None)
        session.set_config_variable("region", self._region)
        if session.get_config_variable("metadata_service_num_attempts") == 1:  # botocore's default
            session.set_config_variable("metadata_service_num_attempts", _METADATA_ATTEMPTS)
        # For the requests for keys. They are not repeated here: `calls.Calls` does that, with its own pauses.
        session.set_default_client_config(
            Config(
                connect_timeout=_CONNECT_SECONDS,
                read_timeout=max(self._timeout / 3, 1.0),
                retries={"max_attempts": 1},
            )
        )
        return session

    def _wants_code(self, session: _Session) -> bool:
        """Return whether the profile, or one in its chain of source profiles, asks for the code of an MFA
        device."""
        profiles = session.full_config.get("profiles", {})
        name = str(session.get_config_variable("profile") or "default")
        for _ in range(_MOST_PROFILES):
            profile = profiles.get(name, {})
            if "role_arn" in profile and "mfa_serial" in profile:
                return True
            if "source_profile" not in profile:
                break
            name = profile["source_profile"]
        return False

    def _is_instance(self) -> bool:
        """Return whether this is an instance of EC2, whose metadata service may be asked."""
        if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
            return False
        try:
            return self._vendor_file.read_text().strip() == "Amazon EC2"
        except OSError:
            return False
