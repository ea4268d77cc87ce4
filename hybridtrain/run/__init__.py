"""Implementation of the verbs train, export, quantize and virtual."""
