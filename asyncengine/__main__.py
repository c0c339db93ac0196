"""``python -m asyncengine`` is the command line."""

import sys

from asyncengine.cli.main import main

sys.exit(main())
