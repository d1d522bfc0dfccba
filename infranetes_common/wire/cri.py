# SPDX-License-Identifier: Apache-2.0
"""The CRI's messages, enums and services, as ``proto/cri.proto`` describes them."""

from infranetes_common.wire.descriptors import namespace

globals().update(namespace("cri.proto"))
