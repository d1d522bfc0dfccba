"""Infranetes' tests; ``python -m tests`` runs them."""

from hypothesis import settings

# A noisy machine makes an example slow; that says nothing about the code.
settings.register_profile("infranetes", deadline=None)
settings.load_profile("infranetes")
