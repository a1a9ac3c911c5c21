"""Saving and loading extended models and adapters."""
