"""`python -m shmstore`: the command line of the store."""

import sys

from .cli import main

sys.exit(main())
