"""The command line: `offcompile plan`, `check`, `fit`, `record`, `hardware` and `doctor`.

In: arguments and files. Out: tables or JSON, and an exit status. Each command imports the heavy
modules that it needs.
"""

from .command import main

__all__ = ["main"]
