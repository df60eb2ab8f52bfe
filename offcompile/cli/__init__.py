"""The command line: `offcompile plan`, `check`, `fit`, `record`, `hardware` and `doctor`.

In: arguments and files. Out: tables or JSON, and an exit status. Heavy modules are imported by the
command that needs them.
"""

from .command import main

__all__ = ["main"]
