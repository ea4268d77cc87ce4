"""The output projection and its cross entropy, forward and backward in slices of tokens: no logits are kept."""

from hybridkernels.linear_cross_entropy.op import cross_entropy_grad_, linear_cross_entropy, padded_vocab

__all__ = ["cross_entropy_grad_", "linear_cross_entropy", "padded_vocab"]
