"""The version of the package, as pyproject.toml names it."""

VERSION = "0.1.0"
