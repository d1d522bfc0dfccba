# SPDX-License-Identifier: Apache-2.0
"""What pods and containers use: gathered from the agents on demand, and translated to the CRI's messages."""
