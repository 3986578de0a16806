"""Public leaks, each rebuilt from its description as the smallest module that has it, beside one without the fault."""
