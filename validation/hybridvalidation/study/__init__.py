"""Studies of quality and time to loss, by protocols registered before the first run."""
