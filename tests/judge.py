"""Reads the digit in a picture; judges the default model for every test that draws with it.

Fitted on the half of scikit-learn's digits that the model never saw. The rules are `scripts/digits.py`, which
training uses as well, so that they exist once.
"""

from digits import draw, halves, read_digits, share_read, to_features

__all__ = ["draw", "halves", "read_digits", "share_read", "to_features"]
