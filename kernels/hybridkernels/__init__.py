"""Kernels behind torch.library ops: each folder holds a plain reference, the op with its fake, and its launchers."""
