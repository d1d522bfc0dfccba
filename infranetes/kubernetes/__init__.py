# SPDX-License-Identifier: Apache-2.0
"""Kubernetes' objects, followed at the API server.

kubeconfig  how to reach the API server, and as whom
credentials the access that it gives, kept fresh
api_server  requests to it
watch       what to ask for, and what an answer means: without I/O
follow      asks for one kind of objects, again and again
fields      objects as values, checked
kinds       what becomes of the objects of one kind
cluster     several kinds, kept up to date without keeping the reactor busy
"""
