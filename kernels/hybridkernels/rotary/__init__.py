"""Rotary position embedding."""

from hybridkernels.rotary.op import rotary

__all__ = ["rotary"]
