"""One file per trainer, used as its authors intend.

A file has one or both of two functions. ``train(task)`` runs a few optimizer steps of a task (``task.py``) and returns
their losses: ``hybridtrain peers`` calls it on a virtual card, on the CPU and on CUDA. ``plan(common, config, card)``
follows the protocol of a publication and returns figures in bytes: ``hybridtrain recorded`` calls it.
"""
