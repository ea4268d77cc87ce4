"""Rollout of a recurrent state-space model: several ticks of GRU, categorical prior and head in one op."""

from hybridkernels.rssm_gru.op import rssm_rollout
from hybridkernels.rssm_gru.reference import RssmRollout, draw_classes, gru_cell, unimix

__all__ = ["RssmRollout", "draw_classes", "gru_cell", "rssm_rollout", "unimix"]
