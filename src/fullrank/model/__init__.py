"""Models: embedding -> blocks (attention, feed-forward) -> output layer."""
