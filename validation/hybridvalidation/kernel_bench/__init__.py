"""Microbenchmarks of the kernels: cases and providers, checked, timed, recorded, compared."""
