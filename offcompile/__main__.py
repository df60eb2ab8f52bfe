"""`python -m offcompile` is the command `offcompile`."""

from offcompile.cli.command import main

raise SystemExit(main())
