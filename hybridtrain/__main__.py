"""``python -m hybridtrain`` is the ``hybridtrain`` command."""

import sys

from hybridtrain.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
