"""Optimizers on several networks: tuned, untouched, and over rates. Not in the paper."""
