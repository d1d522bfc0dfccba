# SPDX-License-Identifier: Apache-2.0
"""The CRI's services: one module per group of RPCs, which validates and translates and decides nothing."""
