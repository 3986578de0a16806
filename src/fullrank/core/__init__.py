"""The definition: every model and every equation, readable from top to bottom; it imports torch and itself."""
