# SPDX-License-Identifier: Apache-2.0
from twisted.application.service import ServiceMaker

infranetes = ServiceMaker(
    "infranetes", "infranetes.service", "Each pod sandbox is a virtual machine.", "infranetes"
)
