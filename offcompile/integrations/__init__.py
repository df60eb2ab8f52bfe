"""Callbacks for other packages' trainers; each module here needs the package of its name."""
