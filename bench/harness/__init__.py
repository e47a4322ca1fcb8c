"""The benchmark's harness: one server, one subprocess per role, medians over interleaved repeats."""
