"""The ``hybridtrain`` command."""
