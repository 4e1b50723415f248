"""Performs `python -m isobatch_cli`: the program, without its installed script."""

import sys

from isobatch_cli.main import main

sys.exit(main())
