"""LoRA for forecasts: freezes a model and puts low-rank adapters on its linear layers."""
