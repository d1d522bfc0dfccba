"""What vSphere's faults mean."""

from __future__ import annotations

import re
import ssl
from http.client import HTTPException
from typing import Any
from xml.parsers.expat import ExpatError

from pyVmomi import vim, vmodl

from infranetes.providers.cloud.interface import CloudError, Trouble

_MAX_WORDS = 400
# The first that fits counts: some of these derive from others.
_NAMES = (
    (Trouble.CREDENTIALS, "InvalidLogin NoPermission NotAuthenticated PasswordExpired NoClientCertificate"),
    (Trouble.MISSING, "ManagedObjectNotFound NotFound"),
    (Trouble.CONFLICT, "DuplicateName AlreadyExists"),
    (
        Trouble.CAPACITY,
        "InsufficientResourcesFault NoDiskSpace NoCompatibleHost NoActiveHostInCluster "
        "DatacenterMismatch InaccessibleDatastore DatastoreNotWritableOnHost",
    ),
    (
        Trouble.QUOTA,
        "LicenseRestricted NotEnoughLicenses LimitExceeded TooManyHosts TooManyDevices",
    ),
    (
        Trouble.PASSING,
        "TaskInProgress ConcurrentAccess HostCommunication HostNotReachable Timedout RequestCanceled "
        "FileLocked ResourceInUse HostConfigFailed SystemError MethodDisabled InvalidState",
    ),
    (
        Trouble.INVALID,
        "InvalidArgument NotSupported MethodNotFound InvalidType InvalidRequest InvalidName InvalidVmConfig "
        "InvalidFolder InvalidDatastore VmConfigFault VirtualHardwareCompatibilityIssue",
    ),
)
_FAULTS = [
    (trouble, getattr(module, name))
    for trouble, names in _NAMES
    for name in names.split()
    for module in (vim.fault, vmodl.fault)
    if hasattr(module, name)
]
_STATUS = re.compile(r"([0-9]{3})\b")


def judge(error: Any) -> CloudError | None:
    """What pyVmomi means by an error, or a task by its fault; None: it did not say."""
    if isinstance(error, CloudError):
        return error
    if isinstance(error, vmodl.MethodFault):
        return CloudError(_trouble(error), said(error))
    if isinstance(error, ssl.SSLCertVerificationError):
        return CloudError(
            Trouble.INVALID,
            f"the vCenter's certificate is not to be trusted ({said(error)}): see host and ca_file",
        )
    if isinstance(error, ExpatError):
        return CloudError(Trouble.PASSING, "an answer that is none; something between may have made it")
    if isinstance(error, HTTPException):
        found = _STATUS.match(str(error))
        status = int(found[1]) if found else 500  # no answer at all, otherwise
        trouble = {429: Trouble.THROTTLED, 401: Trouble.CREDENTIALS, 403: Trouble.CREDENTIALS}
        return CloudError(trouble.get(status, Trouble.PASSING), said(error))
    return None


def _trouble(fault: Any) -> Trouble:
    for trouble, kind in _FAULTS:
        if isinstance(fault, kind):
            return trouble
    # A bare one is vCenter's way to say that something in it failed.
    return Trouble.PASSING if type(fault) is vmodl.RuntimeFault else Trouble.BROKEN


def said(error: Any) -> str:
    """The fault's kind and words: one line, bounded."""
    kind = type(error).__name__.rpartition(".")[2]
    words = getattr(error, "msg", None) or ("" if isinstance(error, vmodl.MethodFault) else str(error))
    privilege = getattr(error, "privilegeId", None)
    needs = f" (privilege {privilege})" if privilege else ""
    return f"{kind}{needs}: {' '.join(str(words).split())}"[:_MAX_WORDS].rstrip(": ")
