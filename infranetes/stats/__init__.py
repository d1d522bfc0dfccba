# SPDX-License-Identifier: Apache-2.0
"""The resource usage of pods and containers, asked of the agents on demand and translated to CRI messages."""
