"""Mechanisms against their peers, interleaved in one process: time, peak memory, growth with length."""
