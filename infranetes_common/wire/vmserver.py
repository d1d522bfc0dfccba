# SPDX-License-Identifier: Apache-2.0
"""The agent's messages and service, as ``proto/vmserver.proto`` describes them."""

from infranetes_common.wire.descriptors import namespace

globals().update(namespace("vmserver.proto"))
