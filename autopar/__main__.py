"""``python -m autopar``, which torchrun starts as ``torchrun ... -m autopar``."""

import sys

from autopar.cli import main

sys.exit(main())
