# SPDX-License-Identifier: Apache-2.0
"""clouds.yaml: where a cloud is, and how its Keystone knows the node.

It is the file that OpenStack's other clients read (source: openstacksdk, "Configuring OpenStack SDK
Applications"), which Horizon offers for download. `secure.yaml` beside it may have the secrets. Profiles of
vendors, and ways of authentication other than passwords and application credentials, are refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import attrs
import yaml

from infranetes.providers.cloud.interface import CloudError, ErrorKind

INTERFACES = ("public", "internal", "admin")
_MAX_BYTES = 1 << 20
_PLACES = ("~/.config/openstack/clouds.yaml", "/etc/openstack/clouds.yaml")
_PASSWORD = ("", "password", "v3password")
_APPLICATION = ("v3applicationcredential", "application_credential")
_SECRETS = ("password", "application_credential_secret")
_NO_TLS = "verify: false would trust any server: name the CA's certificate by cacert"


@attrs.frozen
class Access:
    """The access to a cloud, as clouds.yaml describes it.

    :ivar auth_url: Keystone's, without a version. :ivar request: the body that asks Keystone for a token.
    :ivar interface: one of INTERFACES. :ivar ca_file: of trusted CAs; "": the system's.
    """

    auth_url: str
    request: Mapping[str, object] = attrs.field(repr=False)
    region: str = ""
    interface: str = "public"
    ca_file: str = ""


def find(configured: str) -> Path:
    """Return the file's path: the configured one, or where other clients find it."""
    given = configured or os.environ.get("OS_CLIENT_CONFIG_FILE", "")
    if given:
        return Path(given)
    places = [Path(place).expanduser() for place in _PLACES]
    return next((place for place in places if place.exists()), places[-1])


def _thd_read(path: Path, cloud: str) -> Access:
    """Read a cloud's entry. :raise CloudError: it can't be used; says why, without secrets."""
    entry = _entry(path, cloud)
    if entry is None:
        raise _refusal(f"{path} has no cloud called {cloud!r}")
    secure = path.with_name("secure.yaml")
    if secure.exists():
        entry = _merged(entry, _entry(secure, cloud) or {})
    return access(entry, f"{path}: cloud {cloud!r}")


def access(entry: Mapping[str, object], where: str) -> Access:
    """Return the access that an entry describes. :param where: for people."""
    auth = entry.get("auth")
    if not isinstance(auth, Mapping) or not isinstance(auth.get("auth_url"), str):
        raise _refusal(f"{where} has no auth_url below auth; profiles of vendors are not known")
    if entry.get("verify") is False:
        raise _refusal(f"{where}: {_NO_TLS}")
    interface = _text(entry, "interface") or "public"
    if interface.removesuffix("URL") not in INTERFACES:
        raise _refusal(f"{where}: interface is one of {', '.join(INTERFACES)}")
    auth_url = str(auth["auth_url"]).rstrip("/").removesuffix("/v3").removesuffix("/v2.0").rstrip("/")
    if not auth_url.startswith(("https://", "http://")):
        raise _refusal(f"{where}: auth_url is no URL")
    return Access(
        auth_url=auth_url,
        request=token_request(auth, _text(entry, "auth_type"), where),
        region=_text(entry, "region_name"),
        interface=interface.removesuffix("URL"),
        ca_file=str(Path(_text(entry, "cacert")).expanduser()) if entry.get("cacert") else "",
    )


def token_request(auth: Mapping[str, object], auth_type: str, where: str) -> Mapping[str, object]:
    """Return the body of a request for a token (source: Identity API v3, "Password authentication with scoped
    authorization", "Authenticating with an Application Credential")."""
    if auth_type in _APPLICATION or (not auth_type and "application_credential_secret" in auth):
        identity: dict[str, object] = {
            "methods": ["application_credential"],
            "application_credential": _application(auth, where),
        }
        return {"auth": {"identity": identity}}  # the project is the credential's own
    if auth_type not in _PASSWORD:
        raise _refusal(f"{where}: auth_type {auth_type!r} is neither password nor v3applicationcredential")
    user = {**_user(auth, where), "password": _required(auth, "password", where)}
    scope = {"project": _project(auth, where)}
    return {"auth": {"identity": {"methods": ["password"], "password": {"user": user}}, "scope": scope}}


def _application(auth: Mapping[str, object], where: str) -> Mapping[str, object]:
    secret = {"secret": _required(auth, "application_credential_secret", where)}
    id = _text(auth, "application_credential_id")
    if id:
        return {"id": id, **secret}
    name = _required(auth, "application_credential_name", where)  # a name is unique only for its user
    return {"name": name, "user": _user(auth, where), **secret}


def _user(auth: Mapping[str, object], where: str) -> Mapping[str, object]:
    if _text(auth, "user_id"):
        return {"id": _text(auth, "user_id")}
    return {"name": _required(auth, "username", where), "domain": _domain(auth, "user")}


def _project(auth: Mapping[str, object], where: str) -> Mapping[str, object]:
    id = _text(auth, "project_id") or _text(auth, "tenant_id")
    if id:
        return {"id": id}
    name = _text(auth, "project_name") or _required(auth, "tenant_name", where)
    return {"name": name, "domain": _domain(auth, "project")}


def _domain(auth: Mapping[str, object], of: str) -> Mapping[str, str]:
    for prefix in (f"{of}_domain", "domain"):
        for key in ("id", "name"):
            if _text(auth, f"{prefix}_{key}"):
                return {key: _text(auth, f"{prefix}_{key}")}
    return {"id": "default"}


def _entry(path: Path, cloud: str) -> Mapping[str, object] | None:
    """Return a cloud's entry in a file, if it has one. If it has secrets, no other user may be able to read
    the file."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            content = file.read(_MAX_BYTES)
    except OSError as error:
        raise _refusal(f"{path} can't be read: {error.strerror}") from None
    try:
        found = (yaml.safe_load(content) or {})["clouds"].get(cloud)
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        raise _refusal(f"{path} is no clouds.yaml") from None
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise _refusal(f"{path}: cloud {cloud!r} is no mapping")
    auth = found.get("auth")
    if mode & 0o077 and isinstance(auth, Mapping) and any(key in auth for key in _SECRETS):
        raise _refusal(f"{path} may be read by others (mode {mode:04o}): chmod 600 it")
    return found


def _merged(entry: Mapping[str, object], more: Mapping[str, object]) -> Mapping[str, object]:
    auths = [each for each in (entry.get("auth"), more.get("auth")) if isinstance(each, Mapping)]
    return {**entry, **more, "auth": {key: value for auth in auths for key, value in auth.items()}}


def _text(table: Mapping[str, object], key: str) -> str:
    value = table.get(key)
    return "" if value is None else str(value)


def _required(auth: Mapping[str, object], key: str, where: str) -> str:
    if not _text(auth, key):
        raise _refusal(f"{where} has no {key} below auth")
    return _text(auth, key)


def _refusal(words: str) -> CloudError:
    return CloudError(ErrorKind.CREDENTIALS, words)
