"""Tests named ``test_interpreted*`` run kernels in Triton's interpreter, which is settled when triton is imported.

So they have a session of their own, ``tests-kernels``, which sets TRITON_INTERPRET=1; the other tests never see it.
"""

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

_OTHERS = ["*/test_[!i]*.py", "test_[!i]*.py"]
_INTERPRETED = ["*/test_interpreted*.py", "test_interpreted*.py"]
collect_ignore_glob = _OTHERS if INTERPRETED else _INTERPRETED
