"""``python -m hybridvalidation`` is the ``hybridtrain`` command."""

import sys

from hybridtrain.cli.main import main

sys.exit(main())
