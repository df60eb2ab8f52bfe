"""The answers of `offcompile.fit`, in words and as JSON. They are made in `ahead/fit.py`."""
