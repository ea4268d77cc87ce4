"""The purposes of storages on the card."""

from enum import StrEnum


class TensorClass(StrEnum):
    """The purpose of a storage on the card. The first five have a cell in the memory plan."""

    WEIGHT = "weight"
    """Parameters as the forward pass reads them."""
    MASTER = "master"
    """Higher-precision copy of the weights that the optimizer updates; absent when weights are already exact."""
    GRAD = "grad"
    """Gradients of parameters, from the backward pass until the update."""
    OPTIM_STATE = "optim_state"
    """First and second moments."""
    BOUNDARY = "boundary"
    """Block inputs kept between forward and backward."""
    ACTIVATION = "activation"
    """Everything else a forward or backward pass holds: saved tensors, logits, flowing gradients, token ids."""
    WORKSPACE = "workspace"
    """Scratch of libraries and kernels, and temporaries of the update."""
