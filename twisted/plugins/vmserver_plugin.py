# SPDX-License-Identifier: Apache-2.0
from twisted.application.service import ServiceMaker

vmserver = ServiceMaker("vmserver", "vmserver.service", "The Infranetes agent in a sandbox's VM", "vmserver")
