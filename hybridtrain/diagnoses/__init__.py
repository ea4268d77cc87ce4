"""Known problems of training: a table for the diagnosis of logs, and a page of the guide.

>>> [answer.trouble.name for answer in diagnose("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")]
['card-too-small']
"""

from hybridtrain.diagnoses.diagnosis import Answer, diagnose, diagnosis_text, read_log, unknown_error
from hybridtrain.diagnoses.measures import counted
from hybridtrain.diagnoses.table import Trouble, troubles, troubles_page

__all__ = [
    "Answer", "Trouble", "counted", "diagnose", "diagnosis_text", "read_log", "troubles", "troubles_page",
    "unknown_error",
]  # fmt: skip
