"""Does a stack train as well: several sizes, paired seeds, equivalence tests, registered before the first run."""
