# SPDX-License-Identifier: Apache-2.0
"""The agent's gRPC service: checks requests and hands them to the provider and the other rooms."""
