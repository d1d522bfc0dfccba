# SPDX-License-Identifier: Apache-2.0
"""The messages and services of kubelet's plug-ins, as ``proto/pluginregistration.proto`` describes them."""

from infranetes_common.wire.descriptors import namespace

globals().update(namespace("pluginregistration.proto"))
