"""The C++ kernel of weighted attention."""
