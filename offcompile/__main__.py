"""`python -m offcompile` is the command `offcompile`."""

from offcompile.cli import main

raise SystemExit(main())
