"""Benchmarks: data in, one JSON line out, the baseline in the same run. Nothing here runs in a served application."""
