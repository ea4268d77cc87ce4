"""``python -m hybridvalidation`` is the ``hybridtrain`` command."""

import sys

from hybridvalidation.cli.main import main

sys.exit(main())
