"""How far the time model was from recorded steps that it had not seen."""

from typing import Final

from hybridtrain.virtual_gpu.cards.roofline import time_errors

TIME_ERROR: Final = time_errors()["source_out"].mean_absolute
"""Mean absolute error, relative, of recorded steps of repositories left out of the fit, each repository the same. It is
no bound, and of single speeds."""
KEPT_BACK_ERROR: Final = time_errors()["kept_back"].mean_absolute
"""That of recorded steps kept back until all was fitted, each step the same."""
RATIO_ERROR: Final = time_errors()["ratio"].mean_absolute
"""That of ratios of two steps of one trainer, model, length and card, whose errors are alike in part."""
_WAITING_BEFORE_CHANGES = 0.22
"""Of four recorded runs that wait, predicted at -20, -20, +2 and +46 % before a rule was added with them known
(results/time-model.md, runs that wait for copies)."""
WAITING_ERROR: Final = max(time_errors()["waiting"].mean_absolute, _WAITING_BEFORE_CHANGES)
"""That of recorded steps in which the card waits for copies. None was fitted; other runs on their cards were."""
