"""Long runs whose counts stand in docs/trust.md: `make soak`, or `python -m tests.trust NAME`."""
