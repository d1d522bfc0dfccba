# SPDX-License-Identifier: Apache-2.0
"""A session at a vCenter, which is renewed when it has expired.

libcloud's own login can't be used: when the server's certificate does not verify, 3.4.1 sends the password
all the same, over a connection that is not verified, and says nothing. It has no deadline for answers and
does not notice that a session has expired.
"""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, Protocol

from pyVim.connect import VimSessionOrientedStub
from pyVmomi import SoapStubAdapter, StubAdapterBase, vim

from infranetes.providers.cloud.interface import CloudError, ErrorKind
from infranetes.providers.cloud.vsphere.files import DatastoreFiles
from infranetes.providers.cloud.vsphere.pyvmomi_types import ManagedObject, ServiceContent, SessionManager
from infranetes.providers.cloud.vsphere.tls import tls_context

API = "vim.version.version11"  # vSphere 6.5's, which later releases support too
VOLUMES_API = "vim.version.version12"  # vSphere 6.7's, the first with the calls that volumes need
PORT = 443
GOODBYE_SECONDS = 2.0


class _MethodInfo(Protocol):
    """pyVmomi's description of a method."""

    wsdlName: str


class VCenterSession(VimSessionOrientedStub):  # type: ignore[misc]
    """Sends requests. Logs in with the first one, and again when the session has expired.

    :param timeout: seconds that one answer may take. :param api: the release whose calls are made."""

    def __init__(
        self,
        host: str,
        username: str,
        password_file: Path,
        ca_file: Path | None,
        timeout: float,
        api: str = API,
    ) -> None:
        name, _, port = host.partition(":")
        stub = SoapStubAdapter(
            host=name, port=int(port or PORT), path="/sdk", version=api, sslContext=tls_context(ca_file)
        )
        stub.schemeArgs["timeout"] = timeout  # pyVmomi 6.7.1 has no argument for it
        self._files = DatastoreFiles(name, int(port or PORT), ca_file, timeout)
        super().__init__(stub, self._log_in)
        self._username = username
        self._password_file = password_file
        self._content: ServiceContent | None = None

    @property
    def content(self) -> ServiceContent:
        """The vCenter's managers, which never change. Asked for without a session, as its manager is one."""
        if self._content is None:
            instance = vim.ServiceInstance("ServiceInstance", _WithoutLogin(self))
            self._content = instance.RetrieveContent()
        return self._content

    def InvokeMethod(
        self, mo: ManagedObject, info: _MethodInfo, args: Sequence[object]
    ) -> Any:  # Any: each method has an answer of its own
        """Send a request, and once more only if it changes nothing: vCenter closes idle connections. pyVmomi
        itself would repeat any request several times, each time with a new deadline, even if it may have been
        carried out."""
        may_repeat, is_renewed = not info.wsdlName.endswith("_Task"), False
        while True:
            try:
                if self.state == self.STATE_UNAUTHENTICATED:
                    self._CallLoginMethod()
                status, answer = self.soapStub.InvokeMethod(mo, info, args, self)
            except (HTTPException, ConnectionError) as error:
                if not may_repeat or str(error).startswith("429"):
                    raise
                may_repeat = False
                continue
            if status == 200:
                return answer
            if is_renewed or not isinstance(answer, vim.fault.NotAuthenticated):
                raise answer
            is_renewed = True
            self.expired()

    def expired(self) -> None:
        """Make the next request log in."""
        self._SetStateUnauthenticated()

    def fetch(self, url: str, begin: int, size: int) -> bytes | None:
        """Return a part of a file of a datastore; None: it ends before that.

        :param url: at this vCenter.
        :raise CloudError: `ErrorKind.NOT_FOUND`: there is no such file."""
        for is_last in (False, True):
            if self.state == self.STATE_UNAUTHENTICATED:
                self._CallLoginMethod()
            cookie = str(self.soapStub.cookie or "").partition(";")[0]
            answer = self._files._thd_part(url, cookie, begin, size)
            if answer.status != 401 or is_last:
                break
            self.expired()
        return answer.content()

    def close(self) -> None:
        """End the session, which would count among the vCenter's for half an hour, and the connections."""
        self.soapStub.DropConnections()
        if self.state == self.STATE_AUTHENTICATED:
            self.soapStub.schemeArgs["timeout"] = GOODBYE_SECONDS
            with contextlib.suppress(Exception):
                self._manager().Logout()
        self.expired()
        self.soapStub.DropConnections()

    def _log_in(self, stub: SoapStubAdapter) -> None:
        password = _thd_password(self._password_file)
        self._manager().Login(self._username, password, None)

    def _manager(self) -> SessionManager:
        """Return what logs in and out: its calls are made without a login."""
        manager: SessionManager = vim.SessionManager(self.content.sessionManager._moId, self.soapStub)
        return manager


class _WithoutLogin(StubAdapterBase):  # type: ignore[misc]
    """Sends requests of a session without a login. The objects in the answers use the session."""

    def __init__(self, session: VCenterSession) -> None:
        super().__init__(session.version)
        self._session = session

    def InvokeMethod(
        self, mo: ManagedObject, info: _MethodInfo, args: Sequence[object]
    ) -> Any:  # Any: each method has an answer of its own
        status, answer = self._session.soapStub.InvokeMethod(mo, info, args, self._session)
        if status != 200:
            raise answer
        return answer


def _thd_password(file: Path) -> str:
    """Read the password, anew for each session: it may have been changed meanwhile.

    :raise CloudError: there is none, or other users may read it."""
    try:
        with file.open(encoding="utf-8") as opened:
            mode = stat.S_IMODE(file.stat().st_mode)
            password = opened.readline(1024).rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise CloudError(ErrorKind.CREDENTIALS, f"password_file {file} can't be read: {why}") from None
    if mode & 0o077:
        raise CloudError(
            ErrorKind.CREDENTIALS, f"password_file {file} may be read by others (mode {mode:o}): chmod 600 it"
        )
    if not password:
        raise CloudError(ErrorKind.CREDENTIALS, f"password_file {file} is empty")
    return password
