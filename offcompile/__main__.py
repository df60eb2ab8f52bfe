"""`python -m offcompile` is the command `offcompile`."""

from offcompile.cli.main import main

raise SystemExit(main())
