# SPDX-License-Identifier: Apache-2.0
"""What a cloud sells and at which price, and which of its sizes a pod gets."""
