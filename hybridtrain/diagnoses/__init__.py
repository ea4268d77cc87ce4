"""What goes wrong in training: one table that answers for a log, and is a page of the guide.

>>> [answer.trouble.name for answer in diagnose("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")]
['card-too-small']
"""

from hybridtrain.diagnoses.diagnosis import Answer, diagnose, diagnosis_text, read_log
from hybridtrain.diagnoses.measures import counted
from hybridtrain.diagnoses.table import Trouble, troubles, troubles_page

__all__ = ["Answer", "Trouble", "counted", "diagnose", "diagnosis_text", "read_log", "troubles", "troubles_page"]
