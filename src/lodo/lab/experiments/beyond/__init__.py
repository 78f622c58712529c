"""Experiments that the paper does not have."""
