"""Protocols of time to loss, registered before the first run."""
