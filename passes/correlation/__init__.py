"""Learning what runs next, and what it will touch (DeepUM). No effects: a runtime drives it."""
