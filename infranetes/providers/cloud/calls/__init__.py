# SPDX-License-Identifier: Apache-2.0
"""How a cloud is asked: in threads, within its limits, with what its errors and its credentials mean."""
