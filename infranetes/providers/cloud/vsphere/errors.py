# SPDX-License-Identifier: Apache-2.0
"""What vSphere's faults mean."""

from __future__ import annotations

import re
import ssl
from http.client import HTTPException
from xml.parsers.expat import ExpatError

from pyVmomi import vim, vmodl

from infranetes.providers.cloud.interface import CloudError, ErrorKind

_MAX_MESSAGE = 400
# The first match counts, as some of these classes derive from others.
_NAMES = (
    (ErrorKind.CREDENTIALS, "InvalidLogin NoPermission NotAuthenticated PasswordExpired NoClientCertificate"),
    (ErrorKind.NOT_FOUND, "ManagedObjectNotFound NotFound FileNotFound"),
    (ErrorKind.CONFLICT, "DuplicateName AlreadyExists FileAlreadyExists"),
    (
        ErrorKind.CAPACITY,
        "InsufficientResourcesFault NoDiskSpace NoCompatibleHost NoActiveHostInCluster "
        "DatacenterMismatch InaccessibleDatastore DatastoreNotWritableOnHost",
    ),
    (
        ErrorKind.QUOTA,
        "LicenseRestricted NotEnoughLicenses LimitExceeded TooManyHosts TooManyDevices",
    ),
    (
        ErrorKind.TRANSIENT,
        "TaskInProgress ConcurrentAccess HostCommunication HostNotReachable Timedout RequestCanceled "
        "FileLocked ResourceInUse HostConfigFailed SystemError MethodDisabled InvalidState",
    ),
    (
        ErrorKind.INVALID,
        "InvalidArgument NotSupported MethodNotFound InvalidType InvalidRequest InvalidName InvalidVmConfig "
        "InvalidFolder InvalidDatastore VmConfigFault VirtualHardwareCompatibilityIssue",
    ),
)
_FAULTS = [
    (kind, getattr(module, name))
    for kind, names in _NAMES
    for name in names.split()
    for module in (vim.fault, vmodl.fault)
    if hasattr(module, name)
]
_STATUS = re.compile(r"([0-9]{3})\b")


def classify(error: Exception) -> CloudError | None:
    """Return what an error of pyVmomi, or the fault of a task, means; None: it is neither."""
    if isinstance(error, CloudError):
        return error
    if isinstance(error, vmodl.MethodFault):
        return CloudError(_kind(error), message_of(error))
    if isinstance(error, ssl.SSLCertVerificationError):
        return CloudError(
            ErrorKind.INVALID,
            f"the vCenter's certificate can't be verified ({message_of(error)}): see host and ca_file",
        )
    if isinstance(error, ExpatError):
        return CloudError(ErrorKind.TRANSIENT, "a malformed answer, perhaps of a proxy in between")
    if isinstance(error, HTTPException):
        match = _STATUS.match(str(error))
        status = int(match[1]) if match else 500  # without a status, there was no answer at all
        kinds = {429: ErrorKind.THROTTLED, 401: ErrorKind.CREDENTIALS, 403: ErrorKind.CREDENTIALS}
        return CloudError(kinds.get(status, ErrorKind.TRANSIENT), message_of(error))
    return None


def _kind(fault: Exception) -> ErrorKind:
    for kind, fault_class in _FAULTS:
        if isinstance(fault, fault_class):
            return kind
    # vCenter raises a bare RuntimeFault when something within vCenter failed.
    return ErrorKind.TRANSIENT if type(fault) is vmodl.RuntimeFault else ErrorKind.UNEXPECTED


def message_of(error: Exception) -> str:
    """The fault's class and message as one line of bounded length."""
    name = type(error).__name__.rpartition(".")[2]
    message = getattr(error, "msg", None) or ("" if isinstance(error, vmodl.MethodFault) else str(error))
    privilege = getattr(error, "privilegeId", None)
    needs = f" (privilege {privilege})" if privilege else ""
    return f"{name}{needs}: {' '.join(str(message).split())}"[:_MAX_MESSAGE].rstrip(": ")
