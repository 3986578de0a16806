"""The rooms where a configuration becomes data, model and loop."""
