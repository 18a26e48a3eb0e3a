"""`pdray doctor`: what serving needs on this machine, each finding with what mends it. Starts nothing that stays."""
