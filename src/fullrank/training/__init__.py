"""Training: one loop that is given the model and every policy (`loop`), and the policies themselves."""
