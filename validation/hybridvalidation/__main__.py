"""``python -m hybridvalidation`` is the ``hybridtrain`` command."""

import sys

from hybridvalidation.cli import main

sys.exit(main())
