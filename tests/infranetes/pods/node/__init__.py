# SPDX-License-Identifier: Apache-2.0
"""What the pods of a node share."""
