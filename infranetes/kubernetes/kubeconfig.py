# SPDX-License-Identifier: Apache-2.0
"""Reading a kubeconfig: the API server's address, and the credentials for it.

Source: Kubernetes' reference of kubeconfig (v1) and of client.authentication.k8s.io (v1, v1beta1).
The files that it names are read each time, since certificates and tokens rotate.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit, urlunsplit

import attrs
import yaml

from infranetes_common.errors import FailedPrecondition

T = TypeVar("T")
MAX_BYTES = 1 << 20
CONFIG_EXTENSION = "client.authentication.k8s.io/exec"
EXEC_VERSIONS = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")


@attrs.frozen
class Plugin:
    """A command that prints credentials.

    :ivar environment: additional environment variables. :ivar version: the API version that it speaks.
    :ivar told_cluster: whether it receives the cluster's data, including `cluster_config`.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str] = attrs.field(repr=False)
    version: str
    told_cluster: bool = False
    cluster_config: object = None


@attrs.frozen
class Access:
    """The access that a kubeconfig describes.

    :ivar server: the server's URL, without a trailing slash.
    :ivar authority: CA certificates that verify the server, as PEM; empty: the system's.
    :ivar server_name: the name that the server's certificate must have; "": the URL's host.
    :ivar certificate: the client's certificate, as PEM. :ivar key: its private key, as PEM.
    """

    server: str
    authority: bytes = b""
    server_name: str = ""
    certificate: bytes = b""
    key: bytes = attrs.field(default=b"", repr=False)
    token: str = attrs.field(default="", repr=False)
    plugin: Plugin | None = None


def thd_read(path: Path, host: str = "") -> Access:
    """Read a kubeconfig and the files that it names. Blocks.

    :param host: an address or name to use instead of the server's; "": use that one.
    :raise FailedPrecondition: the kubeconfig can't be read, or is not valid.
    """
    content = _Section(_loaded(path), path, "")
    context = content.named("contexts", content.text("current-context")).section("context")
    cluster = content.named("clusters", context.text("cluster")).section("cluster")
    user = content.named("users", context.text("user")).section("user")
    if cluster.get("insecure-skip-tls-verify", bool, False):
        raise FailedPrecondition(
            f"{cluster.where}: insecure-skip-tls-verify is not supported, because whoever answers would "
            "decide where "
            "the pods' connections go; give its certificate-authority"
        )
    if cluster.text("proxy-url"):
        raise FailedPrecondition(
            f"{cluster.where}: proxy-url is not supported; give a kubeconfig whose server this node reaches "
            "directly"
        )
    token = user.text("token")
    if not token and (token_file := user.text("tokenFile")):
        token = _thd_file(path.parent / token_file).decode(errors="replace").strip()
    return Access(
        _server(cluster, host),
        cluster.thd_data("certificate-authority"),
        cluster.text("tls-server-name"),
        user.thd_data("client-certificate"),
        user.thd_data("client-key"),
        token,
        _plugin(user, cluster, path),
    )


def _loaded(path: Path) -> object:
    try:
        return yaml.safe_load(_thd_file(path))
    except (yaml.YAMLError, RecursionError):
        raise FailedPrecondition(f"{path} is no kubeconfig: it can't be read as YAML") from None


def _thd_file(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise FailedPrecondition(f"{path} can't be read: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise FailedPrecondition(f"{path} has more than {MAX_BYTES} bytes")
    return content


def _server(cluster: _Section, host: str) -> str:
    parts = urlsplit(cluster.text("server"))
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise FailedPrecondition(f"{cluster.where}: server has to be a URL such as https://10.0.0.1:6443")
    if host:
        written = f"[{host}]" if ":" in host else host
        parts = parts._replace(netloc=f"{written}:{parts.port}" if parts.port else written)
    return urlunsplit(parts).rstrip("/")


def _plugin(user: _Section, cluster: _Section, path: Path) -> Plugin | None:
    given = user.section("exec")
    command = given.text("command")
    if not command:
        return None
    version = given.text("apiVersion")
    if version not in EXEC_VERSIONS:
        raise FailedPrecondition(f"{given.where}: apiVersion has to be one of {', '.join(EXEC_VERSIONS)}")
    if "/" in command:
        command = str(path.parent.absolute() / command)
    variables = {
        str(each["name"]): str(each["value"])
        for each in given.get("env", list, [])
        if isinstance(each, dict) and each.keys() >= {"name", "value"}
    }
    return Plugin(
        (command, *map(str, given.get("args", list, []))),
        variables,
        version,
        given.get("provideClusterInfo", bool, False),
        _cluster_config(cluster),
    )


def _cluster_config(cluster: _Section) -> object:
    """Return the plug-ins' own configuration in the cluster's entry, or None."""
    for each in cluster.get("extensions", list, []):
        if isinstance(each, dict) and each.get("name") == CONFIG_EXTENSION:
            return each.get("extension")
    return None


class _Section:
    """A mapping in a kubeconfig. :ivar where: its place, for errors."""

    def __init__(self, value: object, path: Path, where: str) -> None:
        self.where = f"{path}: {where}" if where else str(path)
        self._path = path
        if not isinstance(value, dict):
            raise FailedPrecondition(f"{self.where} has to be a mapping")
        self._value = value

    def get(self, key: str, kind: type[T], default: T) -> T:
        value = self._value.get(key)
        if value is not None and not isinstance(value, kind):
            raise FailedPrecondition(f"{self.where}: {key} can't be of type {type(value).__name__}")
        return default if value is None else value

    def text(self, key: str) -> str:
        return self.get(key, str, "")

    def section(self, key: str) -> _Section:
        return _Section(self.get(key, dict, {}), self._path, key)

    def named(self, key: str, name: str) -> _Section:
        for each in self.get(key, list, []):
            if isinstance(each, dict) and each.get("name") == name:
                return _Section(each, self._path, f"{key} {name}")
        raise FailedPrecondition(f"{self.where} has no {key} named {name!r}")

    def thd_data(self, key: str) -> bytes:
        """Return the data given as base64 in `KEY-data` or in the file named by `KEY`, or b"". Blocks."""
        if data := self.text(f"{key}-data"):
            try:
                return base64.b64decode(data, validate=True)
            except binascii.Error:
                raise FailedPrecondition(f"{self.where}: {key}-data is no base64") from None
        name = self.text(key)
        return _thd_file(self._path.parent / name) if name else b""
